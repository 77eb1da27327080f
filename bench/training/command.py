"""`lamina train`: train a byte-level GPT on real text with its state on NVMe or within a memory budget.

The only module of the demonstration that knows the engine.
"""

import contextlib
import errno
import gc
import math
import os
import shutil
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from lamina.bench.generate import NotFiniteError, generate
from lamina.bench.interrupt import Interrupt
from lamina.bench.report import Reporter, format_seconds, process_memory, reset_peak_memory
from lamina.bench.state_folder import StateFolder, why_not_writable
from lamina.bench.timeline import draw, read_step, require_drawable
from lamina.bench.training.args import TrainingRun, parse
from lamina.bench.training.corpus import Batch, Corpus
from lamina.bench.training.gpt import GPT, VOCABULARY
from lamina.bench.training.printed import (
    Outcome,
    describe_run,
    print_comparison,
    print_outcome,
    progress_text,
)
from lamina.bench.training.reference import PlainTrainer, train_plain
from lamina.bench.training.result import result
from lamina.engine import TrainingEngine, initialize
from lamina.tiers.memory.limits import read_memory_limits
from lamina.zero import Init

HELD_OUT_BATCHES = 8
PROMPT_BYTES = 64
FP32_BYTES = 4
LEAST_BYTES_PER_TOKEN = 2 * 8 + VOCABULARY * FP32_BYTES
"""What no placement takes out of memory: a token and its target in int64, and its logits."""


def main(arguments: Sequence[str]) -> int:
    """Run `lamina train ARGUMENTS...`; returns the exit code. Errors go to the caller."""
    options, run = parse(arguments)
    report = Reporter(as_json=options.json)
    if options.compare:
        refuse_comparison(run)
    if options.timeline is not None:
        require_drawable(Path(options.timeline))
        check_writable(Path(options.timeline), option="--timeline")
    if options.trace is not None:
        check_writable(Path(options.trace), option="--trace")
    corpus = Corpus.load(options.text)
    corpus.require(run.shape.seq)
    require_room(run, in_memory=options.compare)
    require_batch_room(run)
    with Interrupt() as interrupt, contextlib.ExitStack() as stack:
        machine = report.machine()
        describe_run(report, run, corpus.source, len(corpus.text))
        if run.nvme_path is not None:
            stack.enter_context(StateFolder(run.nvme_path, option="--nvme-path"))
        demonstration = Demonstration(run, corpus, report, interrupt)
        ours = demonstration.train(
            "tiered",
            run.engine_config(),
            sample=options.sample,
            temperature=options.temperature,
            trace=options.trace,
        )
        print_outcome(report, run, ours)
        if options.timeline is not None and ours.metrics:
            draw([read_step(Path(options.trace))], Path(options.timeline))
            report.line(f"timeline written to {options.timeline}, its trace to {options.trace}")
        others: list[Outcome] = []
        if options.compare and not interrupt.requested:
            others = demonstration.compare(ours.rates)
            if not interrupt.requested:
                print_comparison(report, run, ours, others)
        report.json(result(vars(options), machine, run, corpus, ours, [] if interrupt.requested else others))
        return interrupt.exit_code


def refuse_comparison(run: TrainingRun) -> None:
    """ValueError for what plain PyTorch cannot be held against, before anything is trained."""
    if run.dtype == "fp16":
        raise ValueError("--compare with --dtype fp16: plain PyTorch has another loss scaler; use bf16 or fp32")
    kind = run.config["optimizer"].get("type")
    if kind != "AdamW":
        raise ValueError(f"--compare knows the optimizer AdamW, and the config says {kind!r}")


def require_room(run: TrainingRun, *, in_memory: bool) -> None:
    """MemoryError or OSError unless the model can be built, in fp32: on the first NVMe path, or ``in_memory``."""
    needed = FP32_BYTES * run.shape.num_params
    folder = None if in_memory else Init(config=run.engine_config()).folder
    if folder is None:
        free, limit = read_memory_limits().allowance()
    else:
        existing = next(path for path in (Path(folder), *Path(folder).parents) if path.exists())
        free, limit = shutil.disk_usage(existing).free, "free there"
    if needed > free:
        message = (
            f"the model of {run.shape.num_params:,} parameters (--layers {run.shape.layers}, --dim {run.shape.dim}) "
            f"needs {needed:,} bytes of {'memory' if folder is None else folder} while it is built, and there are {free:,} "
            f"({limit}): choose fewer --layers or a smaller --dim"
        )
        raise MemoryError(message) if folder is None else OSError(errno.ENOSPC, message)


def require_batch_room(run: TrainingRun) -> None:
    """MemoryError for a micro-batch that is too large whatever the budgets are: drawing it alone would take minutes."""
    needed = LEAST_BYTES_PER_TOKEN * run.batch * run.shape.seq
    free, limit = read_memory_limits().allowance()
    if needed > free:
        raise MemoryError(
            f"a micro-batch of {run.batch:,} sequences of {run.shape.seq} bytes (--batch, --seq) needs {needed:,} bytes for "
            f"tokens and logits alone, and there are {free:,} ({limit}): choose a smaller --batch, and more --accum"
        )


def check_writable(path: Path, *, option: str) -> None:
    """OSError unless a file can be written at `path`: found out before training, and without making it."""
    folder = path.absolute().parent
    if path.is_dir():
        number = errno.EISDIR
    elif not folder.is_dir():
        number = errno.ENOTDIR if folder.exists() else errno.ENOENT
    else:
        number = why_not_writable(path if path.exists() else folder)
    if number:
        raise OSError(number, f"{option}: {os.strerror(number)}", str(path))


def device_of(engine: TrainingEngine) -> torch.device:
    """Where the engine computes and batches have to be."""
    device = getattr(engine, "device", torch.device("cpu"))
    return torch.device(device)


class Demonstration:
    """One model and text, trained in several ways on the same batches."""

    def __init__(self, run: TrainingRun, corpus: Corpus, report: Reporter, interrupt: Interrupt) -> None:
        self.run = run
        self.corpus = corpus
        self.report = report
        self.interrupt = interrupt

    def model(self) -> GPT:
        """The model as it is before training: the same for the same seed."""
        torch.manual_seed(self.run.seed)
        return GPT(self.run.shape)

    def batches(self, step: int, device: torch.device) -> list[Batch]:
        """The micro-batches of one optimizer step."""
        run = self.run
        drawn = (
            self.corpus.training_batch(seed=run.seed, step=step, micro=micro, batch=run.batch, seq=run.shape.seq)
            for micro in range(run.accum)
        )
        return [Batch(batch.tokens.to(device), batch.targets.to(device)) for batch in drawn]

    def held_out_loss(self, model: Callable[..., Any], device: torch.device) -> float:
        """Mean loss on held-out text; `model(tokens, targets)` is a module or an engine in eval mode."""
        losses = []
        batches = self.corpus.held_out_batches(count=HELD_OUT_BATCHES, batch=self.run.batch, seq=self.run.shape.seq)
        with torch.no_grad():
            for batch in batches:
                self.interrupt.check()
                losses.append(float(model(batch.tokens.to(device), batch.targets.to(device))))
        return statistics.fmean(losses)

    def train(
        self,
        name: str,
        config: Mapping[str, Any],
        *,
        sample: int = 0,
        temperature: float = 0.0,
        trace: str | None = None,
    ) -> Outcome:
        """Train through the engine. A requested stop ends it after the step, with what there is by then."""
        outcome = Outcome(name=name, rss_before=process_memory()["rss"])
        reset_peak_memory()
        began = time.perf_counter()
        with self.engine(config, trace=trace is not None) as engine:
            outcome.setup_s = time.perf_counter() - began
            outcome.placement = str(engine.plan)
            outcome.setup_peak_rss = process_memory()["peak_rss"]
            reset_peak_memory()
            self.report.line(f"\n{name}: where its state lies (ready in {format_seconds(outcome.setup_s)})")
            self.report.line("\n".join(f"  {line}" for line in outcome.placement.splitlines()))
            self.report.line()
            self._train(engine, outcome, sample=sample, temperature=temperature)
            if trace is not None:
                engine.write_trace(trace)
        outcome.peak_rss = process_memory()["peak_rss"]
        outcome.interrupted = self.interrupt.requested
        gc.collect()  # hooks and modules refer to each other; the next run needs the memory
        return outcome

    @contextlib.contextmanager
    def engine(self, config: Mapping[str, Any], *, trace: bool) -> Iterator[TrainingEngine]:
        """An engine around a new model, closed at the end however that comes."""
        with Init(config=dict(config)):  # the whole model is never in memory where its state is not
            model = self.model()
        engine, *_ = initialize(model=model, config=dict(config), trace=trace)
        with engine:
            yield engine

    def _train(self, engine: TrainingEngine, outcome: Outcome, *, sample: int, temperature: float) -> None:
        device = device_of(engine)
        try:
            outcome.held_out_before = self._evaluate(engine, device)
            began = time.perf_counter()
            self._steps(engine, outcome, device)
            outcome.training_s = time.perf_counter() - began
            self.interrupt.check()
            outcome.held_out_after = self._evaluate(engine, device)
            diverged = self._warn_of_divergence(outcome)
            if sample and not diverged:
                prompt = self.corpus.prompt(seed=self.run.seed, length=min(PROMPT_BYTES, self.run.shape.seq))
                outcome.sample = (prompt, self._sample(engine, device, prompt, sample, temperature))
        except NotFiniteError as error:
            self.report.warning(f"{outcome.name}: {error}: no sample")
        except KeyboardInterrupt:
            if not self.interrupt.requested:
                raise

    def _warn_of_divergence(self, outcome: Outcome) -> bool:
        """Whether the loss after training is not finite; a warning where any loss was not."""
        bad = [step for step, loss in enumerate(outcome.losses, start=1) if not math.isfinite(loss)]
        diverged = not math.isfinite(outcome.held_out_after)
        if bad or diverged:
            where = f"from step {bad[0]} of {len(outcome.losses)}" if bad else "on held-out text"
            self.report.warning(
                f"{outcome.name}: the loss is not finite ({where}){': no sample' if diverged else ''}; "
                "try a lower --lr or a --clip"
            )
        return diverged

    def _steps(self, engine: TrainingEngine, outcome: Outcome, device: torch.device) -> None:
        run = self.run
        engine.train()
        with self.report.progress(run.steps, title=outcome.name) as progress:
            for step in range(run.steps):
                if self.interrupt.requested:
                    return
                outcome.rates.append(engine.get_lr()[0])
                losses = []
                for batch in self.batches(step, device):
                    loss = engine(*batch)
                    engine.backward(loss)
                    engine.step()
                    losses.append(float(loss.detach()))
                outcome.losses.append(sum(losses) / len(losses))
                outcome.metrics.append(engine.metrics())
                progress.advance(progress_text(outcome.losses[-1], run.tokens_per_step, engine.metrics()))

    def _evaluate(self, engine: TrainingEngine, device: torch.device) -> float:
        engine.eval()
        return self.held_out_loss(engine, device)

    def _sample(
        self, engine: TrainingEngine, device: torch.device, prompt: bytes, count: int, temperature: float
    ) -> bytes:
        engine.eval()
        return generate(
            lambda tokens: engine(tokens.to(device)),
            prompt,
            count=count,
            seq=self.run.shape.seq,
            seed=self.run.seed,
            temperature=temperature,
            on_byte=self.interrupt.check,
        )

    def compare(self, rates: Sequence[float]) -> list[Outcome]:
        """The same training with everything in memory, by the engine and by plain PyTorch at these rates."""
        in_memory = self.train("in memory", self.run.in_memory_config())
        if self.interrupt.requested:
            return [in_memory]
        return [in_memory, self._train_plain(rates)]

    def _train_plain(self, rates: Sequence[float]) -> Outcome:
        run = self.run
        outcome = Outcome(name="plain PyTorch", rates=list(rates))
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        trainer = PlainTrainer(
            self.model(),
            dtype=run.dtype,
            optimizer=run.config["optimizer"],
            clip=run.config["gradient_clipping"],
            device=str(device),
        )
        try:
            outcome.held_out_before = self.held_out_loss(trainer.model, device)
            with self.report.progress(run.steps, title=outcome.name) as progress:

                def on_step(loss: float) -> None:
                    self.interrupt.check()
                    progress.advance(f"loss {loss:.3f}")

                began = time.perf_counter()
                outcome.losses = train_plain(
                    trainer, batches_of=lambda step: self.batches(step, device), rates=rates, on_step=on_step
                )
                outcome.training_s = time.perf_counter() - began
            outcome.held_out_after = self.held_out_loss(trainer.model, device)
        except KeyboardInterrupt:
            if not self.interrupt.requested:
                raise
        return outcome
