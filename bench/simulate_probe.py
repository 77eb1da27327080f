"""One training run in a process of its own, for `simulate` and `frontier`: what it took, as one line of JSON.

    python -m lamina.bench.simulate_probe '{"shape": {...}, "config": {...}, ...}'

With "times" (seconds of a run in memory) the step is also simulated, from them, the placement and a probe of the disk.
"""

import json
import sys
import time
from statistics import median
from typing import Any

import torch

from lamina.bench.gpt import GPT, VOCABULARY, GPTShape
from lamina.engine import initialize
from lamina.tiers import BandwidthModel, ComputeTimes, PlacementQuestion, Simulation, probe_disk
from lamina.tiers.bandwidth import Link, disk_link
from lamina.tiers.stripe_weights import device_shares
from lamina.zero import ZeroRuntime
from lamina.zero.fitting import segment_size


def measure(job: dict[str, Any]) -> dict[str, Any]:
    """Train `warm_up` + `steps` steps of one shape under one config; medians of the latter."""
    torch.manual_seed(0)
    tokens = torch.randint(VOCABULARY, (job["micro_batch"], job["shape"]["seq"]))
    engine, _, _, _ = initialize(model=GPT(GPTShape(**job["shape"])), config=job["config"])
    accumulation = engine.config.gradient_accumulation_steps
    seconds, all_metrics = [], []
    with engine:
        for _ in range(job["warm_up"] + job["steps"]):
            began = time.perf_counter()
            for _ in range(accumulation):
                engine.backward(engine(tokens, tokens))
                engine.step()
            seconds.append(time.perf_counter() - began)
            all_metrics.append(engine.metrics())
        kept = all_metrics[job["warm_up"] :]
        result: dict[str, Any] = {
            "step_s": median(seconds[job["warm_up"] :]),
            "forward_s": median(item.forward_s for item in kept),
            "backward_s": median(item.backward_s for item in kept),
            "update_s": median(item.update_s for item in kept),
            "commit_s": median(item.commit_s for item in kept),
            "read_bytes": median(item.link_bytes.get("nvme->host", 0) for item in kept),
            "written_bytes": median(item.link_bytes.get("host->nvme", 0) for item in kept),
            "stalled_s": median(sum(item.stalled_s.values()) for item in kept),
            "lower_bound_s": median(item.lower_bound_s for item in kept),
            "peak_bytes": dict(kept[-1].peak_bytes),
            "trained": sum(segment.layout.numel for segment in engine.runtime.segments if segment.trainable),
        }
        if job.get("times"):
            done = predict(engine.runtime, job, result["commit_s"], accumulation)
            result["predicted"] = done.as_dict()
    return result


def predict(runtime: ZeroRuntime, job: dict[str, Any], commit_s: float, accumulation: int) -> Simulation:
    """The simulated step of a runtime. Compute comes from the run in memory, the disk from a probe; of the run itself only
    the seconds of the commit, which no model describes."""
    options, times = runtime.options, job["times"]
    segments = tuple(segment_size(segment, options, runtime.ranks) for segment in runtime.segments)
    recorded = tuple(access.group for access in runtime.executor.trace.recorded)
    question = PlacementQuestion(
        segments=segments,
        budgets=options.budgets,
        wishes=options.wishes,
        links=BandwidthModel(_disks(runtime)),
        times=ComputeTimes.proportional(
            segments,
            forward_s=times["forward_s"] / accumulation,
            backward_s=times["backward_s"] / accumulation,
            adam_elements_per_s=times["adam_elements_per_s"],
            commit_s=commit_s,
        ),
        micro_batches=accumulation,
        lookahead=options.lookahead,
        order=_one_micro_batch(recorded, accumulation, len(runtime.groups)),
    )
    return question.predict(runtime.placement)


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
