"""How many weights a verifier and its drafter have, and which of them a step reads. Pure arithmetic on config.json.

An EAGLE-3 drafter counts as: the frozen embedding (a step reads a few rows of it, so nothing to speak of), `fc` (K x H
-> H, read once a round, when the verifier's features come in), one decoder layer whose q, k and v read twice the hidden
size, norms, and the lm_head over the draft vocabulary. `body` is fc and the layer; body plus lm_head is what a draft
step reads.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vocab.coverage import check_size, lm_head_parameters
from vocab.errors import VocabError


@dataclass(frozen=True)
class Verifier:
    """What a step of the large model costs. Parameters are counts; bytes are of one parameter as it is stored.

    dense: all weights that every token reads: attention, dense and shared MLPs, router, lm_head (no input embedding).
    experts, experts_per_token, expert_parameters (of one expert of one layer), moe_layers: zero without experts.
    kv_bytes: of one token over all layers. Raises VocabError for sizes that no model has.
    """

    name: str
    vocab_size: int
    hidden_size: int
    layers: int
    dense: int
    kv_bytes: float
    dense_bytes: float = 2.0
    experts: int = 0
    experts_per_token: int = 0
    expert_parameters: int = 0
    moe_layers: int = 0
    expert_bytes: float = 2.0
    tied_embeddings: bool = False

    def __post_init__(self) -> None:
        for field in ("vocab_size", "hidden_size", "layers", "dense"):
            if getattr(self, field) < 1:
                raise VocabError(f"verifier {self.name}: {field}: expected at least 1, found {getattr(self, field)}")
        if self.experts_per_token > self.experts:
            raise VocabError(
                f"verifier {self.name}: expected at most {self.experts} experts a token, found {self.experts_per_token}"
            )

    @property
    def weight_bytes(self) -> float:
        """Bytes of all weights, the input embedding included (once, when it is tied to the lm_head)."""
        embedding = 0 if self.tied_embeddings else self.vocab_size * self.hidden_size
        experts = self.experts * self.expert_parameters * self.moe_layers
        return (self.dense + embedding) * self.dense_bytes + experts * self.expert_bytes

    @classmethod
    def from_config(cls, config: Mapping[str, Any], name: str = "", *, expert_bytes: float = 2.0) -> Verifier:
        """From a config.json, or its `text_config`: Llama-like, Qwen3, Qwen3-MoE, DeepSeek-V3 / Kimi (MLA, experts).

        Raises VocabError that names a key that is missing.
        """
        inner = config.get("text_config")
        c = inner if isinstance(inner, Mapping) else config
        try:
            hidden, layers, vocab = int(c["hidden_size"]), int(c["num_hidden_layers"]), int(c["vocab_size"])
            heads, wide = int(c["num_attention_heads"]), int(c["intermediate_size"])
        except KeyError as error:
            raise VocabError(f"config.json: expected the key {error}, found {sorted(c)[:8]}") from error
        if c.get("kv_lora_rank"):  # MLA: DeepSeek-V2 and after
            rank, nope, rope = int(c["kv_lora_rank"]), int(c["qk_nope_head_dim"]), int(c["qk_rope_head_dim"])
            value, q_rank = int(c["v_head_dim"]), int(c.get("q_lora_rank") or 0)
            query = hidden * q_rank + q_rank * heads * (nope + rope) if q_rank else hidden * heads * (nope + rope)
            attention = query + hidden * (rank + rope) + rank * heads * (nope + value) + heads * value * hidden
            kv = 2.0 * (rank + rope) * layers
        else:
            head_dim = int(c.get("head_dim") or hidden // heads)
            kv_heads = int(c.get("num_key_value_heads") or heads)
            attention = 2 * hidden * heads * head_dim + 2 * hidden * kv_heads * head_dim
            kv = 2.0 * 2 * kv_heads * head_dim * layers
        experts = int(c.get("n_routed_experts") or c.get("num_experts") or 0)
        dense_layers = int(c.get("first_k_dense_replace") or 0) if experts else layers
        narrow = int(c.get("moe_intermediate_size") or wide)
        shared = int(c.get("n_shared_experts") or 0) * 3 * hidden * narrow
        moe_layers = layers - dense_layers
        dense = layers * attention + dense_layers * 3 * hidden * wide + moe_layers * (shared + hidden * experts)
        return cls(
            name=name or str(c.get("model_type", "verifier")),
            vocab_size=vocab,
            hidden_size=hidden,
            layers=layers,
            dense=dense + vocab * hidden,
            kv_bytes=kv,
            experts=experts,
            experts_per_token=int(c.get("num_experts_per_tok") or 0) if experts else 0,
            expert_parameters=3 * hidden * narrow if experts else 0,
            moe_layers=moe_layers if experts else 0,
            expert_bytes=expert_bytes,
            tied_embeddings=bool(config.get("tie_word_embeddings") or c.get("tie_word_embeddings")),
        )


@dataclass(frozen=True)
class Drafter:
    """A drafter but for the size of its draft vocabulary. body: fc, layer and norms; fc is the part of it read once."""

    vocab_size: int
    hidden_size: int
    body: int
    fc: int
    tied_embeddings: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.fc <= self.body:
            raise VocabError(
                f"drafter: expected a body of at least its fc ({self.fc:,} parameters), found {self.body:,}"
            )

    @classmethod
    def llama_layer(
        cls,
        *,
        vocab_size: int,
        hidden_size: int,
        intermediate_size: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        features: int = 3,
    ) -> Drafter:
        """EAGLE-3's one layer of these widths, on `features` captured states of the verifier."""
        fc = features * hidden_size * hidden_size
        attention = 2 * hidden_size * head_dim * (heads + 2 * kv_heads) + heads * head_dim * hidden_size
        norms = 4 * hidden_size
        body = fc + attention + 3 * hidden_size * intermediate_size + norms
        return cls(vocab_size, hidden_size, body, fc)

    @classmethod
    def of_total(cls, total: int, *, vocab_size: int, hidden_size: int, features: int = 3) -> Drafter:
        """The drafter that has `total` parameters when its draft vocabulary is the whole one (embedding included)."""
        body = int(total) - 2 * vocab_size * hidden_size
        fc = features * hidden_size * hidden_size
        if body < fc:
            raise VocabError(
                f"drafter of {int(total):,} parameters: embedding and lm_head of {vocab_size:,} x {hidden_size:,} alone "
                f"have {2 * vocab_size * hidden_size:,} and fc {fc:,}; give the total with the full vocabulary"
            )
        return cls(vocab_size, hidden_size, body, fc)

    @classmethod
    def from_config(
        cls, config: Mapping[str, Any], *, features: int = 3, changed: Mapping[str, Any] | None = None
    ) -> Drafter:
        """From a drafter's (or a verifier's) config.json. With MLA the layer gets ordinary heads of the values' width.

        changed: keys that the drafter has otherwise, such as head_dim or intermediate_size. Raises VocabError that names a key that is missing.
        """
        inner = config.get("text_config")
        c = dict(inner if isinstance(inner, Mapping) else config)
        if changed and "head_dim" in changed:
            c.pop("v_head_dim", None)
        c |= changed or {}
        try:
            hidden, heads = int(c["hidden_size"]), int(c["num_attention_heads"])
            return cls.llama_layer(
                vocab_size=int(c["vocab_size"]),
                hidden_size=hidden,
                intermediate_size=int(c["intermediate_size"]),
                heads=heads,
                kv_heads=int(c.get("num_key_value_heads") or heads),
                head_dim=int(c.get("v_head_dim") or c.get("head_dim") or hidden // heads),
                features=features,
            )
        except KeyError as error:
            raise VocabError(f"drafter config.json: expected the key {error}, found {sorted(c)[:8]}") from error
        except (TypeError, ValueError, ZeroDivisionError) as error:
            if isinstance(error, VocabError):
                raise
            raise VocabError(f"drafter config.json: expected whole numbers above 0, found {error}") from error

    @property
    def embedding(self) -> int:
        """Parameters of the frozen input embedding, always over the verifier's whole vocabulary."""
        return self.vocab_size * self.hidden_size

    def lm_head(self, size: int) -> int:
        """Parameters of the lm_head over `size` ids. Raises VocabError for a size outside [1, vocab_size]."""
        return lm_head_parameters(check_size(size, self.vocab_size), self.hidden_size)

    def total(self, size: int) -> int:
        """All parameters, embedding included. A full lm_head that is tied to the embedding counts once."""
        shared = self.tied_embeddings and size == self.vocab_size
        return self.embedding + self.body + (0 if shared else self.lm_head(size))

    def step(self, size: int) -> int:
        """Parameters that a draft step reads: the body and the lm_head (an embedding is looked up, not read)."""
        return self.body + self.lm_head(size)


def _deepseek(**changes: int) -> dict[str, int]:
    # moonshotai/Kimi-K2.5 config.json, text_config (DeepSeek-V3 architecture).
    return {
        "hidden_size": 7168,
        "num_hidden_layers": 61,
        "vocab_size": 163840,
        "num_attention_heads": 64,
        "intermediate_size": 18432,
        "kv_lora_rank": 512,
        "q_lora_rank": 1536,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "n_routed_experts": 384,
        "num_experts_per_tok": 8,
        "n_shared_experts": 1,
        "moe_intermediate_size": 2048,
        "first_k_dense_replace": 1,
    } | changes


_QWEN3_8B = {
    "hidden_size": 4096,
    "num_hidden_layers": 36,
    "vocab_size": 151936,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 12288,
}
_SMOLLM2 = {
    "hidden_size": 576,
    "num_hidden_layers": 30,
    "vocab_size": 49152,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "intermediate_size": 1536,
    "tie_word_embeddings": True,
}

# Published config.json files. Kimi-K2.5's experts are INT4 in groups of 32 with a bf16 scale: 4.5 bits a weight.
VERIFIERS: dict[str, Verifier] = {
    "kimi-k2.5": Verifier.from_config(_deepseek(), "Kimi-K2.5", expert_bytes=0.5 + 2 / 32),
    "qwen3-8b": Verifier.from_config(_QWEN3_8B, "Qwen3-8B"),
    "smollm2-135m": Verifier.from_config(_SMOLLM2, "SmolLM2-135M"),
}

# Kimi-K2.5: the project's story counts 3.54 B parameters with the full vocabulary (2.6 B with 32,000 ids). One layer
# shaped after the verifier's config.json has 3.31 B, TorchSpec's published drafter (MLP of 12,288) 3.18 B.
DRAFTERS: dict[str, Drafter] = {
    "kimi-k2.5": Drafter.of_total(3_540_000_000, vocab_size=163840, hidden_size=7168),
    "qwen3-8b": Drafter.from_config(_QWEN3_8B),
    "smollm2-135m": Drafter.from_config(_SMOLLM2),
}


def known_verifier(name: str) -> tuple[Verifier, Drafter]:
    """The verifier of this name and its drafter. Raises VocabError that lists the known ones."""
    if name not in VERIFIERS:
        raise VocabError(f"verifier: expected one of {', '.join(VERIFIERS)}, found {name!r}")
    return VERIFIERS[name], DRAFTERS[name]


def verifier_of(vocab_size: int, hidden_size: int) -> str | None:
    """The name of the known verifier with these sizes, if there is one."""
    for name, verifier in VERIFIERS.items():
        if (verifier.vocab_size, verifier.hidden_size) == (vocab_size, hidden_size):
            return name
    return None
