"""One training run in a process of its own, for `simulate` and `frontier`: what it took, as one line of JSON.

    python -m lamina.bench.simulate_probe '{"shape": {...}, "config": {...}, ...}'

With "times" (seconds of a run in memory) the step is also simulated, from them, the placement and what the first steps measured.
"""

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

from lamina.bench.training.gpt import GPT, VOCABULARY, GPTShape
from lamina.engine import initialize
from lamina.engine.metrics import StepMetrics
from lamina.tiers import BandwidthModel, ComputeTimes, PlacementQuestion, Simulation, probe_disk
from lamina.tiers.links.bandwidth import Link, disk_link
from lamina.tiers.placement.stripe_weights import device_shares
from lamina.zero import ZeroRuntime
from lamina.zero.adam.speed import streamed_adam_rate
from lamina.zero.homes.fitting import segment_size


@dataclass(frozen=True, kw_only=True)
class Step:
    """One step by the clock. ``forward_s``: its forward passes, without what they waited for."""

    seconds: float
    forward_s: float
    metrics: StepMetrics


def measure(job: dict[str, Any]) -> dict[str, Any]:
    """Train `warm_up` + `steps` steps of one shape under one config; medians of the latter (bytes written: the mean, until they
    have arrived). What is predicted is predicted between the two."""
    torch.manual_seed(0)
    tokens = torch.randint(VOCABULARY, (job["micro_batch"], job["shape"]["seq"]))
    engine, _, _, _ = initialize(model=GPT(GPTShape(**job["shape"])), config=job["config"])
    accumulation = engine.config.gradient_accumulation_steps

    def train(steps: int) -> list[Step]:
        done = []
        for _ in range(steps):
            forward_s, began = 0.0, time.perf_counter()
            for _ in range(accumulation):
                asked, stalled_s = time.perf_counter(), engine.runtime.executor.counters.stalled_s
                loss = engine(tokens, tokens)
                forward_s += time.perf_counter() - asked - (engine.runtime.executor.counters.stalled_s - stalled_s)
                engine.backward(loss)
                engine.step()
            done.append(Step(seconds=time.perf_counter() - began, forward_s=forward_s, metrics=engine.metrics()))
        return done

    with engine:
        before = train(job["warm_up"])
        predicted = (
            predict(engine.runtime, job["times"], before[1:] or before, accumulation) if job.get("times") else None
        )
        written = _written(engine.runtime)
        steps = train(job["steps"])
        written = _written(engine.runtime) - written
        kept = [step.metrics for step in steps]
        result: dict[str, Any] = {
            "step_s": median(step.seconds for step in steps),
            "forward_s": median(item.forward_s for item in kept),
            "backward_s": median(item.backward_s for item in kept),
            "update_s": median(item.update_s for item in kept),
            "commit_s": median(item.commit_s for item in kept),
            "read_bytes": median(item.link_bytes.get("nvme->host", 0) for item in kept),
            "written_bytes": written / len(steps),
            "stalled_s": median(sum(item.stalled_s.values()) for item in kept),
            "lower_bound_s": median(item.lower_bound_s for item in kept),
            "peak_bytes": dict(kept[-1].peak_bytes),
            "trained": sum(segment.layout.numel for segment in engine.runtime.segments if segment.trainable),
        }
        if predicted is not None:
            result["predicted"] = predicted.as_dict()
    return result


def _written(runtime: ZeroRuntime) -> int:
    """Bytes written to NVMe so far, and those of the last step's commit that are still on their way."""
    if runtime.store is None or runtime.io is None:
        return 0
    runtime.store.settle()
    return runtime.io.stats().bytes_written


def predict(runtime: ZeroRuntime, times: dict[str, float], warm_up: Sequence[Step], accumulation: int) -> Simulation:
    """The simulated step of a runtime.

    Compute comes from the run in memory. Of the steps before the measured ones come: the links' rates, as the engine keeps
    them; the seconds of the commit; and how much longer the forward pass took without its stalls, since fetching costs it
    processor time and memory bandwidth. The backward pass is taken to grow by the same share: updates run beside it, so that
    what fetching costs it cannot be told apart.
    """
    options = runtime.options
    own_state = runtime.residence.own_state
    segments = tuple(segment_size(segment, options, runtime.ranks, own_state) for segment in runtime.segments)
    recorded = tuple(access.group for access in runtime.executor.trace.recorded)
    trained = next(segment for segment in runtime.segments if segment.trainable)
    slower = median(step.forward_s for step in warm_up) / times["forward_s"]
    question = PlacementQuestion(
        segments=segments,
        budgets=options.budgets,
        wishes=options.wishes,
        links=links_of(runtime),
        times=ComputeTimes.proportional(
            segments,
            forward_s=slower * times["forward_s"] / accumulation,
            backward_s=slower * times["backward_s"] / accumulation,
            adam_elements_per_s=times["adam_elements_per_s"],
            streamed_adam_elements_per_s=streamed_adam_rate(
                runtime.kernels, trained.dtype, runtime.gradients[trained].dtype
            ),
            commit_s=median(step.metrics.commit_s for step in warm_up),
        ),
        micro_batches=accumulation,
        lookahead=options.lookahead,
        order=_one_micro_batch(recorded, accumulation, len(runtime.groups)),
    )
    return question.predict(runtime.placement)


def links_of(runtime: ZeroRuntime) -> BandwidthModel:
    """As the engine's own model knows them after the steps so far; probed now where it has made no choice by them."""
    choice = runtime.decision.choice
    return choice.question.links.as_measured() if choice is not None else BandwidthModel(_disks(runtime))


def _one_micro_batch(recorded: tuple[int, ...], accumulation: int, groups: int) -> tuple[int, ...]:
    """The recorded order of one micro-batch; empty where some groups, used at home, leave no trace."""
    one = recorded[: len(recorded) // accumulation]
    return one if len(set(one)) == groups else ()


def _disks(runtime: ZeroRuntime) -> list[Link]:
    """The disks as one link that the present generation is striped over: each probed on its own, now."""
    store = runtime.store
    if store is None or runtime.io is None:
        return []
    shares = device_shares(store.devices, store.shares)
    folder = {device: path.path for device, path in zip(store.devices, runtime.decision.links.paths, strict=True)}
    used = [device for device in shares if shares[device] > 0]
    speeds = [probe_disk(runtime.io, folder[device]) for device in used]
    return [disk_link(speeds, [shares[device] for device in used])]


if __name__ == "__main__":
    print(json.dumps(measure(json.loads(sys.argv[1]))), flush=True)
