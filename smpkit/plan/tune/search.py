"""Search for the configuration whose step is shortest.

Every combination is one that the schema accepts: candidates are made by validating parameters. A bound on the time of
each one orders them; they are predicted in full from the best bound on, and the search ends when no bound is below the
best prediction, or when the time is over: then it says how much faster one that is left could be. Around the best ones
schedule, virtual stages, microbatches in flight, offloading and the partition's weight are varied.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from smpkit.config.modelparallel import ModelParallelConfig
from smpkit.errors import ConfigError
from smpkit.plan.mesh import Mesh
from smpkit.plan.tune.predict import Job, Prediction, RuledOut, half_of, predict, usable_bytes

__all__ = ["Found", "search"]

_VARIED: Final = 4
"""Around how many of the best the rest is varied."""
_NUM_SETTLED: Final = 6
"""How many of the best, at most, are predicted with the schedule that the runtime will change to."""
_MOST_MICROBATCHES: Final = 128
_PATIENCE: Final = 4
"""How many times as long it may take to find a first one that fits."""
_FIRST_SHARE: Final = 0.6
"""Of the time, for degrees and microbatches; the rest is for what is varied around the best."""
_WORTH: Final = 0.005
"""A configuration further from the user's must be faster by this share."""


@dataclass(frozen=True)
class Found:
    """What a search has found."""

    best: tuple[Prediction, ...]
    """The fastest first."""
    present: Prediction | RuledOut | None
    """What the job says as it is; None: it was not asked for, or does not fit the number of ranks."""
    num_candidates: int
    num_predicted: int
    unseen_gap: float
    """By which share of the best step one that was not predicted could be faster; 0: none can."""
    ruled_out: Mapping[str, int] = field(default_factory=dict)
    """Why others are none, with how many of them."""
    nearest: RuledOut | None = None
    """Of those that do not fit, the one that lacks least, where nothing fits."""
    nearest_config: ModelParallelConfig | None = None
    seconds: float = 0.0


def search(
    job: Job,
    given: Mapping[str, Any],
    *,
    budget_seconds: float = 20.0,
    precisions: Sequence[str] = (),
    clock: Callable[[], float] = time.monotonic,
) -> Found:
    """Return the best configurations.

    Args:
        job: what is trained, and where; candidates have the tensor-parallel degrees of `job.models`.
        given: parameters of the job, which hold unless they are searched.
        budget_seconds: for predictions; what has begun is finished.
        precisions: `bf16`, `fp16` or `fp32`, of which the job may have any; empty: its own.
    """
    return _Search(job, given, budget_seconds, precisions, clock).run()


class _Search:
    def __init__(
        self,
        job: Job,
        given: Mapping[str, Any],
        budget_seconds: float,
        precisions: Sequence[str],
        clock: Callable[[], float],
    ) -> None:
        self._job, self._given, self._clock = job, dict(given), clock
        self._began = clock()
        self._budget = budget_seconds
        self._precisions = precisions
        self._reasons: Counter[str] = Counter()
        self._seen: dict[str, Prediction | RuledOut] = {}
        self._nearest: tuple[RuledOut, ModelParallelConfig] | None = None
        self._first = next(iter(job.models.values()))
        self._flops = sum(unit.cost.flops for unit in self._first.units) / self._first.samples
        self._bytes = {
            degree: sum(each.num_bytes for each in model.tensors.values() if each.trainable)
            for degree, model in job.models.items()
        }

    def run(self) -> Found:
        present = self._present()
        candidates = sorted(self._candidates(), key=lambda pair: pair[0])
        unseen = self._go_through(candidates, self._began + _FIRST_SHARE * self._budget)
        for prediction in self._ranking()[:_VARIED]:
            varied = [(self._bound(config), config) for config in self._around(prediction.config)]
            self._go_through(sorted(varied, key=lambda pair: pair[0]), self._began + self._budget)
        ranking = self._settled(self._ranking())
        best = ranking[0].step_seconds if ranking else 0.0
        gap = 0.0 if unseen is None else max(0.0, 1 - unseen / best) if ranking else 1.0
        nearest = self._nearest if not ranking else None
        return Found(
            best=tuple(ranking),
            present=present,
            num_candidates=len(candidates) + sum(self._reasons.values()),
            num_predicted=len(self._seen),
            unseen_gap=gap,
            ruled_out=dict(self._reasons.most_common()),
            nearest=nearest[0] if nearest else None,
            nearest_config=nearest[1] if nearest else None,
            seconds=self._clock() - self._began,
        )

    def _present(self) -> Prediction | RuledOut | None:
        try:
            config, _ = ModelParallelConfig.from_sources(self._given, None)
        except ConfigError:
            return None
        if config.world_problems(self._job.ranks) or config.tensor_parallel_degree not in self._job.models:
            return None
        return self._predict(config)

    def _predict(self, config: ModelParallelConfig) -> Prediction | RuledOut:
        key = config.model_dump_json()
        if key not in self._seen:
            found = self._seen[key] = predict(config, self._job)
            if isinstance(found, RuledOut):
                self._reasons[_sentence(found)] += 1
                lacks = found.missing_bytes
                if lacks and (self._nearest is None or lacks < self._nearest[0].missing_bytes):
                    self._nearest = found, config
        return self._seen[key]

    def _go_through(self, candidates: Sequence[tuple[float, ModelParallelConfig]], end: float) -> float | None:
        """Predict candidates in this order; return the bound of the first that was left although it could be best."""
        best = min((each.step_seconds for each in self._ranking()), default=None)
        for bound, config in candidates:
            if best is not None and bound >= best:
                return None
            if self._clock() > (end if best is not None else self._began + _PATIENCE * self._budget):
                return bound
            found = self._predict(config)
            if isinstance(found, Prediction) and (best is None or found.step_seconds < best):
                best = found.step_seconds
        return None

    def _ranking(self) -> list[Prediction]:
        """Return what fits, the fastest first; of those as fast the one that changes least."""
        return self._ordered([each for each in self._seen.values() if isinstance(each, Prediction)])

    def _settled(self, ranking: Sequence[Prediction]) -> list[Prediction]:
        """Predict the best once more with the schedules that the runtime will settle on; drop what then does not fit.

        To search with these would take several times as long, and orders configurations alike. The best one is always
        predicted again; the next ones as time allows.
        """
        end = self._began + self._budget
        again: list[Prediction] = []
        rest = deque(ranking)
        while rest and len(again) < _NUM_SETTLED and (not again or self._clock() < end):
            found = predict(rest.popleft().config, self._job)
            if isinstance(found, Prediction):
                again.append(found)
        return [*self._ordered(again), *rest]

    def _ordered(self, found: Sequence[Prediction]) -> list[Prediction]:
        if not found:
            return []
        unit = _WORTH * min(each.step_seconds for each in found)
        return sorted(found, key=lambda each: (round(each.step_seconds / unit), self._changes(each), each.step_seconds))

    def _changes(self, prediction: Prediction) -> int:
        values = prediction.config.given()
        return sum(values.get(key) != self._given.get(key) for key in {*values, *self._given})

    # --- candidates ---------------------------------------------------------------------------------------------------

    def _candidates(self) -> Iterator[tuple[float, ModelParallelConfig]]:
        """Yield what the schema accepts, each with a time that its step cannot be shorter than."""
        for values in self._combinations():
            config = self._accepted(values)
            if config is None:
                continue
            room = usable_bytes(self._job.machine)
            needed = self._least_bytes(config)
            if needed > room:
                self._reasons["weights, gradients and states alone do not fit"] += 1
                least = RuledOut("memory", f"weights, gradients and states alone need {needed / 2**30:.1f} GiB")
                least = RuledOut(least.kind, least.reason, round(needed - room))
                if self._nearest is None or least.missing_bytes < self._nearest[0].missing_bytes:
                    self._nearest = least, config
                continue
            yield self._bound(config), config

    def _combinations(self) -> Iterator[dict[str, Any]]:
        ranks = self._job.ranks
        num_units = len(self._first.units)
        for degree in self._job.models:
            for stages in _divisors(ranks // degree):
                if ranks % (degree * stages) or stages > num_units:
                    continue
                replicas = ranks // (degree * stages)
                for values in self._shared(replicas, degree):
                    for precision in self._precisions or ("",):
                        for rounds in self._rounds(stages, replicas, degree):
                            yield {
                                **values,
                                **_precision(precision),
                                "pipeline_parallel_degree": stages,
                                "tensor_parallel_degree": degree,
                                "microbatches": rounds,
                            }

    def _shared(self, replicas: int, degree: int) -> Iterator[dict[str, Any]]:
        """Yield how replicas share states."""
        yield {"shard_optimizer_state": False, "sharded_data_parallel_degree": 1}
        if replicas * degree == 1:
            return
        yield {"shard_optimizer_state": True, "sharded_data_parallel_degree": 1}
        per_host = max(1, self._job.machine.ranks_per_host // degree)
        for shards in sorted({min(per_host, replicas), replicas}):
            if shards > 1 and replicas % shards == 0:
                yield {"shard_optimizer_state": False, "sharded_data_parallel_degree": shards}

    def _rounds(self, stages: int, replicas: int, degree: int) -> Iterator[int]:
        readers = replicas if self._given.get("prescaled_batch") else replicas * degree
        if self._job.samples % readers:
            self._reasons["the samples of a step cannot be divided over the replicas"] += 1
            return
        possible = [each for each in _divisors(self._job.samples // readers) if each <= _MOST_MICROBATCHES]
        # Fewer than there are stages leave some idle all the time; they count where there are not more.
        yield from [each for each in possible if each >= stages] or possible[-1:]

    def _around(self, config: ModelParallelConfig) -> Iterator[ModelParallelConfig]:
        """Yield what differs from `config` in the rest of what is searched."""
        base = config.given()
        stages, rounds = config.pipeline_parallel_degree, config.microbatches
        changes: list[dict[str, Any]] = []
        if not self._job.machine.on_host:
            changes += [
                {"offload_activations": True, "activation_loading_horizon": horizon} for horizon in ("auto", 4, 2)
            ]
            changes += [{"offload_activations": "auto", "activation_loading_horizon": "auto"}]
        if stages > 1:
            changes += [{"pipeline": name} for name in ("zero_bubble", "interleaved")]
            changes += [{"memory_weight": weight} for weight in (0.0, 0.2, 0.5)]
            active = sorted({min(each, rounds) for each in (stages, stages + 2, 2 * stages, rounds)})
            changes += [{"active_microbatches": each} for each in active]
            changes += [{"active_microbatches": rounds, "pipeline": "simple"}]
            for chunks in (2, 3, 4):
                changes.append({"virtual_pipeline_degree": chunks})
                changes += [{"virtual_pipeline_degree": chunks, "memory_weight": weight} for weight in (0.0, 0.2)]
            changes.append({"pipeline": "zero_bubble", "memory_weight": 0.0})
        for change in changes:
            if "virtual_pipeline_degree" in change:
                rest = {key: value for key, value in base.items() if key != "active_microbatches"}
            else:
                rest = base
            if (found := self._accepted({**rest, **change})) is not None:
                yield found

    def _accepted(self, values: Mapping[str, Any]) -> ModelParallelConfig | None:
        """Return the configuration of these parameters, if the schema has one and the ranks can be divided so."""
        merged = {**{key: value for key, value in self._given.items() if key not in _DEPENDENT}, **values}
        if self._job.ranks > merged.get("pipeline_parallel_degree", 1):
            merged["ddp"] = True
        for key, default in _DEFAULTS.items():
            if merged.get(key) == default and key not in self._given:
                merged.pop(key, None)
        try:
            config, _ = ModelParallelConfig.from_sources(merged, None)
        except ConfigError as error:
            self._reasons[_of_schema(error)] += 1
            return None
        if problems := config.world_problems(self._job.ranks):
            self._reasons[_of_schema(ConfigError(problems))] += 1
            return None
        return config

    # --- bounds -------------------------------------------------------------------------------------------------------

    def _bound(self, config: ModelParallelConfig) -> float:
        """Return a time that no step of a configuration is shorter than.

        All ranks together compute what the samples take. Beside that the last stage waits at least for the forwards of
        one microbatch on the others.
        """
        mesh = Mesh.from_world(self._job.ranks, config.pipeline_parallel_degree, config.tensor_parallel_degree)
        work = 3 * self._flops * self._job.samples / mesh.size / self._job.machine.flops(half_of(config))
        stages, rounds = mesh.pp_size, config.microbatches
        forward = work / 3 / rounds
        fill = (stages - 1) / config.virtual_pipeline_degree * forward
        shared = work * self._job.machine.ranks_per_host / self._job.machine.parallel_ranks
        return max(0.9 * (work + fill), 0.9 * shared)

    def _least_bytes(self, config: ModelParallelConfig) -> float:
        """Return what the fullest rank holds at least of weights, gradients and states."""
        degree, stages = config.tensor_parallel_degree, config.pipeline_parallel_degree
        replicas = self._job.ranks // (degree * stages)
        # Tensors of the first tensor rank, one stage of them on a rank.
        weights = self._bytes[degree] / stages
        if config.sharded_data_parallel_degree > 1:
            return 4 * weights / config.sharded_data_parallel_degree
        states = 2 * weights / (replicas * degree if config.shard_optimizer_state else 1)
        return 2 * weights + states


_DEPENDENT: Final = frozenset(
    {"active_microbatches", "virtual_pipeline_degree", "pipeline", "partitions", "offload_activations"}
    | {"activation_loading_horizon", "memory_weight", "auto_partition", "default_partition"}
)
"""Parameters whose defaults are the start of the search; what suits other degrees does not suit these."""
_DEFAULTS: Final[Mapping[str, Any]] = {
    "shard_optimizer_state": False,
    "sharded_data_parallel_degree": 1,
    "tensor_parallel_degree": 1,
}


def _precision(name: str) -> dict[str, Any]:
    return {} if not name else {"bf16": name == "bf16", "fp16": name == "fp16"}


def _divisors(number: int) -> list[int]:
    return [each for each in range(1, number + 1) if number % each == 0]


def _of_schema(error: ConfigError) -> str:
    problem: Any = next(iter(error.problems))
    words = str(problem.message)
    return f"refused: {problem.where} {words.split(' (', maxsplit=1)[0].split(', got', maxsplit=1)[0]}"


def _sentence(found: RuledOut) -> str:
    return {"memory": "do not fit the device, however much is recomputed or offloaded", "batch": found.reason}.get(
        found.kind, found.reason
    )
