"""The engine in a process of its own passes the engine contract."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tiny
from contracts.engine_contract import EngineContract
from fork_server import SMOKE, ForkServer
from headrace.config import ModelSection
from headrace.engines.process.engine import ProcessEngine
from headrace.engines.process.wire import EngineOptions
from headrace.models.causal import build_causal_model
from headrace.models.load import load_model
from headrace.weights.digest import weight_digest
from headrace.weights.shared_memory import SharedWeights
from headrace.weights.source import ModelWeights
from headrace.weights.sync import WeightSync


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.saved_model("llama", tmp_path_factory.mktemp("model"))


class TestProcessEngine(EngineContract):
    vocabulary = tiny.VOCABULARY
    draws = 600

    @pytest.fixture(autouse=True)
    def on_a_saved_model(self, forks: ForkServer, folder: Path) -> None:
        torch.set_num_threads(1)
        self.forks, self.section = forks, ModelSection(name=str(folder))
        self.hf_model = load_model(self.section)
        build_causal_model(self.hf_model)  # as the learner does, which lays the weights out for decoding
        self.made: list[ProcessEngine] = []
        self.weights: list[SharedWeights] = []

    def make_engine(self, **options: Any) -> ProcessEngine:
        given = EngineOptions(self.section, health_every_s=0.001, **options)
        self.weights.append(SharedWeights(ModelWeights(self.hf_model)))
        self.made.append(ProcessEngine(self.weights[-1], given, self.forks.launch))
        return self.made[-1]

    def new_sync(self, engine: ProcessEngine) -> WeightSync:
        return WeightSync(ModelWeights(self.hf_model), self.weights[self.made.index(engine)], engine)

    @torch.no_grad()
    def reference_logprobs(self, ids: Sequence[int]) -> np.ndarray:
        logits = self.hf_model(input_ids=torch.tensor([list(ids)]), use_cache=False).logits[0]
        return torch.log_softmax(logits.double(), dim=-1).numpy()

    def detokenize(self, ids: Sequence[int]) -> str:
        return tiny.detokenize(ids)

    def change_weights(self) -> None:
        tiny.randomise(self.hf_model, seed=99)

    def digest(self) -> str:
        return weight_digest(self.hf_model.parameters())

    def break_model(self) -> str:
        for engine in self.made:
            os.kill(engine.pid, signal.SIGUSR1)
        return SMOKE
