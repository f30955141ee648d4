"""Steps in captured buffers: local training of a client or of replicas, and public steps."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from torch import Tensor

from atoll.compute import autotune, captured
from atoll.compute.accelerated import Candidate, Capture, CaptureKind, Kind
from atoll.compute.autotune import TRIAL, Subject, Tuner, faster
from atoll.compute.captured import Captured
from atoll.compute.choice import Choice
from atoll.compute.deterministic import EQUAL
from atoll.compute.graphs import available
from atoll.compute.kinds.train import TRAIN, damped, exact_work
from atoll.compute.perturb import Draw, flattened, perturbed, stream_of, tiled, typed
from atoll.compute.probe import Probe, Seen
from atoll.compute.public_steps import CapturedStep, capturable, stepped
from atoll.jobs.public_step import PublicJob, PublicResult
from atoll.jobs.train import TrainJob, TrainResult, step_key

__all__ = ["CAPTURED", "CAPTURED_PUBLIC", "CAPTURED_TRAIN", "CAPTURED_TRAINING", "LOCAL", "PUBLIC"]

LOCAL = ""  # the lane of all clients' local steps
BATCHES = 3  # of a proof
SMALL = 32  # rows of a batch of a proof
TIMED = 64  # rows of a batch of a trial
STEPS = 5  # on public images: enough for a graph to be captured and replayed


def _captures(tuner: Tuner, jobs: Mapping[str, TrainJob], refused: frozenset[str]) -> list[Capture]:
    """Jobs that differ in values alone in one step if that is better, others one by one."""
    alike: dict[tuple[Hashable, int], list[str]] = {}
    for id, job in jobs.items():
        # of one row nothing is captured: where a network needs more, the loop names the client
        key = step_key(job) if len(job.rows) > 1 else None
        if key is not None:
            alike.setdefault((key, len(job.rows)), []).append(id)
    captures: list[Capture] = []
    for layout, ids in alike.items():
        works = [jobs[id] for id in ids]
        together = ("replicas", layout[0], len(ids))
        several = len(ids) > 1 and refused.isdisjoint(ids) and captured.replicas(works)
        if several and _together(tuner, together, works):
            captures.append(Capture(together, tuple(ids), layout))
            continue
        single = ("captured", layout[0])
        alone = [id for id in ids if _alone(tuner, single, jobs[id])]
        captures += [Capture(single, (id,), layout) for id in alone]
    return captures


def _together(tuner: Tuner, about: Hashable, jobs: Sequence[TrainJob]) -> bool:
    """Whether replicas take their steps together: as the mode asks, or as measured."""
    if tuner.mode not in ("auto", "stacked"):
        return False
    device = jobs[0].rows.y.device
    subject = Subject(CAPTURED_TRAIN, about, about, device, "replicas")
    return tuner.tuned(subject, jobs).mode == "stacked"


def _alone(tuner: Tuner, about: Hashable, job: TrainJob) -> bool:
    """Whether steps of this job are captured: as the mode asks, or on a GPU as measured."""
    device = job.rows.y.device
    if tuner.mode != "captured" and (tuner.mode == "stacked" or not available(device)):
        return False
    subject = Subject(CAPTURED_TRAIN, about, about, device, "work")
    return tuner.tuned(subject, [job]).mode == "captured"


def _timed(jobs: Sequence[TrainJob], choice: Choice) -> Choice:
    """Captured steps if they are faster than the loop, replicas if than one by one."""
    if len(jobs) == 1:
        return _timed_alone(jobs[0], choice)
    few = [replace(j, rows=j.rows.at(slice(0, TRIAL * j.batch)), epochs=1) for j in jobs]
    seconds = []
    for groups in ([few], [[job] for job in few]):
        buffers = [Captured(group) for group in groups]
        captured.run_captured(buffers, groups)  # makes buffers and captures
        seconds.append(autotune.timed(partial(captured.run_captured, buffers, groups)))
    ratio = seconds[1] / seconds[0]
    return faster(choice, ratio, "replicas in one step are faster", "not faster")


def _timed_alone(job: TrainJob, choice: Choice) -> Choice:
    small = min(job.batch, TIMED)
    few = replace(job, rows=job.rows.at(slice(0, TRIAL * small)), batch=small, epochs=2)
    again = partial(captured.run_captured, [Captured([few])], [[few]])
    again()  # makes buffers and captures
    ratio = autotune.timed(few.run) / autotune.timed(again)
    return faster(choice, ratio, "equal and faster", "not faster")


def _exact(job: TrainJob, number: int, draw: Draw) -> TrainJob:
    """The same number of rows for all, so that each batch size is captured."""
    size = min(job.batch, SMALL)
    rows = BATCHES * size - (size // 2 if size > 3 else 0)
    short = replace(job, rows=tiled(job.rows, rows), batch=size, epochs=4)
    return exact_work(short, number, draw)


def _in_buffers(jobs: Sequence[TrainJob]) -> list[TrainResult]:
    return captured.run_captured([Captured(jobs)], [jobs])[0]


CAPTURED_TRAIN = replace(
    TRAIN,
    exact=_exact,
    candidates=lambda way: [Candidate("captured", _in_buffers)],
    mode=lambda jobs: "stacked" if len(jobs) > 1 else "captured",
    sample=lambda jobs, draws: jobs,
    timed=_timed,
    fixed=lambda jobs, choice: replace(choice, reason=EQUAL),
)
# training steps of one client, or of replicas that take each step together; graphs that run one
# after another may share the memory of their activations
CAPTURED_TRAINING = CaptureKind(
    CAPTURED_TRAIN,
    _captures,
    lane=lambda capture, streams: capture.ids[0] if streams else LOCAL,
    build=Captured,
    run=captured.run_captured,
    prunes=True,
)


# Public steps: captured as asked for, on a GPU also with `auto`


def _public_captures(
    tuner: Tuner, jobs: Mapping[str, PublicJob], refused: frozenset[str]
) -> list[Capture]:
    """Each job whose steps are proved; until there is a batch to follow they are not."""
    captures = []
    for id, job in jobs.items():
        device = next(iter(job.weights.values())).device
        enabled = tuner.mode == "captured" or (tuner.mode == "auto" and available(device))
        key = job.key() if enabled and capturable(job) else None
        if key is None or (key not in tuner and job.follow is None):
            continue
        subject = Subject(PUBLIC, key, key, device, "public step")
        if tuner.proved(subject, [job]).mode == "captured":
            captures.append(Capture(key, (id,), key))
    return captures


def _public_run(
    buffers: Sequence[CapturedStep],
    jobs: Sequence[Sequence[PublicJob]],
    streams: bool,
    probes: Sequence[Probe | None],
) -> list[list[PublicResult]]:
    """All side by side, or one after another."""
    works = [job for several in jobs for job in several]
    if streams:
        return [[result] for result in stepped(buffers, works)]
    return [stepped([buffer], [job]) for buffer, job in zip(buffers, works, strict=True)]


def _public_exact(job: PublicJob, number: int, draw: Draw) -> PublicJob:
    """The same batch at every step, with the values of this draw."""
    if job.follow is None:
        raise ValueError("nothing to follow yet")
    stream = stream_of(number, draw)
    return replace(
        job,
        weights=perturbed(job.weights, stream.child("weights"), draw, frozenset(job.moves)),
        constants=perturbed(job.constants, stream.child("given"), draw, frozenset(job.constants)),
        images=lambda step: typed(job.images(step), draw),
        optimiser=damped(job.optimiser),
        answer=job.follow,
        waiting=None,
    )


def _public_in_buffers(jobs: Sequence[PublicJob]) -> list[PublicResult]:
    buffers = CapturedStep(jobs[0])
    return [_in_a_row(jobs[0], lambda job: stepped([buffers], [job])[0])]


def _seen(job: PublicJob, result: PublicResult) -> Seen:
    """The trained weights, logits and the loss."""
    return Seen({n: result.weights[n] for n in job.moves}, _outputs(result))


def _public_steps(job: PublicJob, steps: int) -> tuple[Mapping[str, Tensor], Seen]:
    """The plain step."""
    return job.weights, _seen(job, replace(job, waiting=None).run())


def _outputs(result: PublicResult) -> dict[str, Tensor]:
    outputs = {"loss": result.loss, "followed": result.followed, "logits": result.logits}
    return {name: tensor for name, tensor in outputs.items() if tensor is not None}


def _in_a_row(job: PublicJob, do: Callable[[PublicJob], PublicResult]) -> PublicResult:
    """Some steps, each on the batch of the first."""
    result = do(job)
    for _ in range(STEPS - 1):
        job = replace(job, weights=result.weights, waiting=result.waiting)
        result = do(job)
    return result


PUBLIC = Kind(
    "equal",
    _public_exact,
    candidates=lambda way: [Candidate("captured", _public_in_buffers)],
    values=lambda result: flattened(weights=result.weights, outputs=_outputs(result)),
    start=lambda job: flattened(weights={name: job.weights[name] for name in job.moves}),
    first_steps=_public_steps,
    seen=_seen,
    mode=lambda jobs: "captured",
    sample=lambda jobs, draws: jobs[:1],
    reference=lambda job: _in_a_row(job, PublicJob.run),
)
CAPTURED_PUBLIC = CaptureKind(
    PUBLIC,
    _public_captures,
    lane=lambda capture, streams: capture.ids[0],  # all clients answer before any of them follows
    build=lambda jobs, lane: CapturedStep(jobs[0], lane),
    run=_public_run,
)
CAPTURED = {TrainJob: CAPTURED_TRAINING, PublicJob: CAPTURED_PUBLIC}
