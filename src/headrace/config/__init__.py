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
from headrace.config.cluster import ClusterSection, K8sSection, LaunchSection, RayJobsSection, SlurmSection
from headrace.config.data import CurriculumSection, DataSection, EvalSection, EvalSet, MixtureSection, SourceSection
from headrace.config.loop import (
    AlarmSection,
    DriftSection,
    FleetSection,
    ProduceSection,
    SimulateSection,
    TrainerSection,
)
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
    "AgentConfig",
    "AgentLoopConfig",
    "AlarmSection",
    "AlgorithmSection",
    "BackendSection",
    "ClusterSection",
    "CorrectionSection",
    "CurriculumSection",
    "DataSection",
    "DistillSection",
    "DpoSection",
    "DriftSection",
    "EngineSection",
    "EvalSection",
    "EvalSet",
    "EvaluatorConfig",
    "FilterSection",
    "FleetSection",
    "GatewaySection",
    "JudgeSection",
    "K8sSection",
    "KlSection",
    "LaunchSection",
    "LedgerSection",
    "LoraSection",
    "MixtureSection",
    "ModelSection",
    "OptimizerSection",
    "ProduceSection",
    "RayJobsSection",
    "RoleSection",
    "RolloutSection",
    "RunConfig",
    "RunSection",
    "Section",
    "SftSection",
    "SimulateSection",
    "SlurmSection",
    "SourceSection",
    "TinkerSection",
    "TrackSection",
    "TrainerSection",
    "Weights",
    "WorkflowSection",
    "flatten",
]


class AgentConfig(Section):
    """What agents do: their tasks, workflow, judgers and limits. Part of every config below."""

    run: RunSection = RunSection()
    data: DataSection = DataSection()
    workflow: WorkflowSection = WorkflowSection()
    judge: JudgeSection = JudgeSection()
    rollout: RolloutSection = RolloutSection()
    gateway: GatewaySection = GatewaySection()
    cluster: ClusterSection = ClusterSection()
    trainer: TrainerSection = TrainerSection()


class EvaluatorConfig(AgentConfig):
    """What an `Evaluator` is built from."""

    eval: EvalSection = EvalSection()


class AgentLoopConfig(AgentConfig):
    """What an `AgentLoopManager` is built from: sampler, agent loop and produce strategy."""

    algorithm: AlgorithmSection = AlgorithmSection()
    filters: FilterSection = FilterSection()
    produce: ProduceSection = ProduceSection()

    @property
    def fresh_groups(self) -> int:
        """Groups of a step that were not trained before; the others are trained again (produce.reuse)."""
        return -(-self.trainer.batch_size // self.produce.reuse)


class RunConfig(AgentLoopConfig, EvaluatorConfig):
    """A complete run. Every section has defaults, so a run file names only what differs."""

    model: ModelSection = ModelSection()
    engine: EngineSection = EngineSection()
    dpo: DpoSection = DpoSection()
    distill: DistillSection = DistillSection()
    sft: SftSection = SftSection()
    optimizer: OptimizerSection = OptimizerSection()
    backend: BackendSection = BackendSection()
    tinker: TinkerSection = TinkerSection()
    alarm: AlarmSection = AlarmSection()
    track: TrackSection = TrackSection()
    ledger: LedgerSection = LedgerSection()
    simulate: SimulateSection = SimulateSection()
    launch: LaunchSection = LaunchSection()
