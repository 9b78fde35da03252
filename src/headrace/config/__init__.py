"""Every configuration class. Frozen, no unknown keys, one docstring per field (they are the `--help` text)."""

from __future__ import annotations

from headrace.config.agents import (
    EngineSection,
    GatewaySection,
    JudgeSection,
    RolloutSection,
    Weights,
    WorkflowSection,
)
from headrace.config.algorithm import (
    AlgorithmSection,
    CorrectionSection,
    DistillSection,
    DpoSection,
    FilterSection,
    KlSection,
    RoleSection,
    SftSection,
)
from headrace.config.base import Section, flatten
from headrace.config.data import CurriculumSection, DataSection, EvalSection, EvalSet, MixtureSection, SourceSection
from headrace.config.loop import AlarmSection, DriftSection, ProduceSection, SimulateSection, TrainerSection
from headrace.config.run import (
    BackendSection,
    LedgerSection,
    LoraSection,
    ModelSection,
    OptimizerSection,
    RunSection,
    TrackSection,
)
from headrace.config.tinker import TinkerSection

__all__ = [
    "AlarmSection",
    "AlgorithmSection",
    "BackendSection",
    "CorrectionSection",
    "CurriculumSection",
    "DataSection",
    "DistillSection",
    "DpoSection",
    "DriftSection",
    "EngineSection",
    "EvalSection",
    "EvalSet",
    "FilterSection",
    "GatewaySection",
    "JudgeSection",
    "KlSection",
    "LedgerSection",
    "LoraSection",
    "MixtureSection",
    "ModelSection",
    "OptimizerSection",
    "ProduceSection",
    "RoleSection",
    "RolloutSection",
    "RunConfig",
    "RunSection",
    "Section",
    "SftSection",
    "SimulateSection",
    "SourceSection",
    "TinkerSection",
    "TrackSection",
    "TrainerSection",
    "Weights",
    "WorkflowSection",
    "flatten",
]


class RunConfig(Section):
    """A whole run. Every section has defaults, so a run file names only what differs."""

    run: RunSection = RunSection()
    model: ModelSection = ModelSection()
    data: DataSection = DataSection()
    workflow: WorkflowSection = WorkflowSection()
    judge: JudgeSection = JudgeSection()
    rollout: RolloutSection = RolloutSection()
    engine: EngineSection = EngineSection()
    algorithm: AlgorithmSection = AlgorithmSection()
    dpo: DpoSection = DpoSection()
    distill: DistillSection = DistillSection()
    sft: SftSection = SftSection()
    filters: FilterSection = FilterSection()
    optimizer: OptimizerSection = OptimizerSection()
    backend: BackendSection = BackendSection()
    tinker: TinkerSection = TinkerSection()
    trainer: TrainerSection = TrainerSection()
    produce: ProduceSection = ProduceSection()
    alarm: AlarmSection = AlarmSection()
    eval: EvalSection = EvalSection()
    track: TrackSection = TrackSection()
    ledger: LedgerSection = LedgerSection()
    simulate: SimulateSection = SimulateSection()
    gateway: GatewaySection = GatewaySection()

    @property
    def fresh_groups(self) -> int:
        """Groups of a step that were not trained before; the others are trained again (produce.reuse)."""
        return -(-self.trainer.batch_size // self.produce.reuse)
