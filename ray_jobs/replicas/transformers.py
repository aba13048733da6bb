"""The oracle: a verifier in transformers, one sequence at a time, nothing clever.

It exists to be compared with. No padding, no batching, no cache across requests: what it returns is the definition
of a hidden state here.
"""

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from ray_jobs.replicas.engine_path.statehouse_teacher import summarise
from ray_jobs.replicas.replica import (
    Forwarded,
    Generation,
    Heard,
    Replica,
    ReplicaConfig,
    Sampling,
    unheard,
    unpack_summary,
    validate_ids,
    validate_layers,
    validate_prompts,
)
from ray_jobs.verifier import VerifierShape, read_config, text_config
from storage.errors import ReplicaFailed
from storage.teacher import NONE, TeacherSummary, topk_of


class TransformersReplica(Replica):
    """AutoModelForCausalLM on the CPU, or on one GPU."""

    def __init__(
        self, config: ReplicaConfig, folder: Path, capture_layers: tuple[int, ...], teacher: str = NONE
    ) -> None:
        self.teacher = teacher
        self.config = config
        self.folder = folder
        self.capture_layers = capture_layers
        verifier = read_config(folder)
        self.shape = VerifierShape.from_config(verifier)
        self.max_length = int(text_config(verifier).get("max_position_embeddings", 2**31))
        validate_layers(capture_layers, self.shape.num_layers)
        self._model: Any = None
        self._lock = threading.Lock()  # prefill and generate share one model

    def start(self) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        if self.config.gpus > 0 and not torch.cuda.is_available():
            raise ReplicaFailed(
                f"the replica asks for {self.config.gpus} GPU(s) and torch sees none; "
                f"set extraction.replica.gpus=0, or run where there is a GPU"
            )
        if self.config.gpus == 0:
            torch.set_num_threads(self.config.threads)  # of the whole process
        model = AutoModelForCausalLM.from_pretrained(
            self.folder,
            dtype=getattr(torch, self.config.dtype),
            trust_remote_code=bool(self.config.args.get("trust_remote_code", False)),
        )
        self._model = model.eval().to("cuda" if self.config.gpus else "cpu")

    @property
    def longest(self) -> int:
        return self.max_length

    def forward(self, batch: Sequence[np.ndarray]) -> list[Forwarded]:
        validate_ids(batch, self.shape.vocab_size, self.max_length)
        return [self._forward(np.asarray(ids)) for ids in batch]

    def _forward(self, ids: np.ndarray) -> Forwarded:
        import torch

        with self._lock, torch.inference_mode():
            model = self._started()
            inputs = torch.tensor(ids, dtype=torch.long, device=model.device)[None]
            hidden = model(inputs, output_hidden_states=True, use_cache=False, logits_to_keep=1).hidden_states
            # hidden[0] is the embedding, hidden[v + 1] the output of layer v, hidden[-1] normed.
            slots = [hidden[layer + 1][0] for layer in self.capture_layers] + [hidden[-1][0]]
            states_TLH = torch.stack(slots, dim=1).cpu()
            summary = self._summary(model, hidden[-1][0])
        if states_TLH.dtype == torch.bfloat16:
            array = states_TLH.view(torch.uint16).numpy().view(ml_dtypes.bfloat16)
        else:
            array = states_TLH.numpy()
        array.flags.writeable = False
        return Forwarded(array, summary)

    def _summary(self, model: Any, final_TH: Any) -> TeacherSummary | None:
        if self.teacher == NONE:
            return None
        head, config = model.get_output_embeddings(), model.config.get_text_config()
        packed = summarise(
            final_TH,
            head.weight,
            max(1, topk_of(self.teacher)),
            bias_V=getattr(head, "bias", None),
            scale=getattr(config, "logit_scale", None),
            softcap=getattr(config, "final_logit_softcapping", None),
        )
        return unpack_summary(packed.cpu().numpy(), self.teacher)

    def generate(
        self, prompts: Sequence[np.ndarray], samplings: Sequence[Sampling], heard: Heard = unheard
    ) -> list[Generation]:
        validate_prompts(prompts, samplings, self.shape.vocab_size, self.max_length)
        generations = []
        for index, (prompt, sampling) in enumerate(zip(prompts, samplings, strict=True)):
            generations.append(self._respond(np.asarray(prompt), sampling))
            heard(index, generations[-1])
        return generations

    def _respond(self, prompt: np.ndarray, sampling: Sampling) -> Generation:
        import torch

        with self._lock, torch.inference_mode():
            model = self._started()
            eos = model.generation_config.eos_token_id
            ends = list(sampling.stop_token_ids)
            if eos is not None and not sampling.ignore_eos:
                ends += eos if isinstance(eos, list) else [eos]
            if sampling.seed is not None:
                torch.manual_seed(sampling.seed)
            arguments: dict[str, Any] = {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
            if sampling.temperature > 0:
                arguments = {
                    "do_sample": True,
                    "temperature": sampling.temperature,
                    "top_p": sampling.top_p,
                    "top_k": 0,
                }
            inputs = torch.tensor(prompt, dtype=torch.long, device=model.device)[None]
            out = model.generate(
                inputs,
                attention_mask=torch.ones_like(inputs),
                max_new_tokens=sampling.max_new_tokens,
                eos_token_id=ends or None,
                pad_token_id=0,
                **arguments,
            )
        ids = out[0, len(prompt) :].cpu().numpy().astype(np.int32)
        return Generation(ids, "stop" if len(ids) and int(ids[-1]) in ends else "length")

    def describe(self) -> dict[str, Any]:
        import transformers

        return {
            "engine": "transformers",
            "engine_version": transformers.__version__,
            "tp_size": 1,
            "engine_dtype": self.config.dtype,
        }

    def stop(self) -> None:
        with self._lock:
            self._model = None

    def _started(self) -> Any:
        if self._model is None:
            raise ReplicaFailed("the transformers replica is not running; call start() first")
        return self._model
