"""Transport "in_place": the engine decodes with the learner's own tensors, and nothing travels."""

from __future__ import annotations

import threading

from headrace.models.causal import CausalModel
from headrace.models.tensor_threads import TensorThread


class InPlace:
    """The learner's model, for an engine in the same process."""

    in_place = True

    def __init__(
        self, model: CausalModel, thread: TensorThread | None = None, scoring: threading.Lock | None = None
    ) -> None:
        self.model = model
        self.thread = thread
        """The learner's, which an engine may share that has nothing to do while the learner works."""
        self.scoring = scoring or threading.Lock()
        """Held by the engine while it scores rows, and by the learner while its adapters are switched off: scoring
        would see that, as decoding does not."""

    async def send(self, version: int) -> None:
        """The tensors are where they always were."""
