"""Proof, from inside the engine, that slot k is the output of layer v and the last slot that of the last norm."""

import os

import torch

PROBE_PREFIX = "canary-"  # requests whose slots are compared with what the next layer read


class LayerProbe:
    """Records, for one batch, what the attention of layer v + 1 reads and what the last norm puts out.

    The attention of layer v + 1 reads input_layernorm(output of layer v), whole on every tensor-parallel rank: so a
    slot holds the output of layer v if and only if that norm maps it to what was read. (The decoder layers' own
    return values would not do: SGLang keeps the residual beside them.)
    """

    def __init__(self, layers, norm, wanted):
        self.norms = [layers[v + 1].input_layernorm for v in wanted]
        self.seen = [None] * (len(wanted) + 1)
        self.hooks = [
            layers[v + 1].self_attn.register_forward_pre_hook(self._record_input(k), with_kwargs=True)
            for k, v in enumerate(wanted)
        ]
        self.hooks.append(norm.register_forward_hook(self._record_final))

    @classmethod
    def of(cls, worker, batch):
        """The probe of a batch that holds a canary; None for other batches and unknown module trees."""
        if batch is None or not any(str(req.rid).startswith(PROBE_PREFIX) for req in batch.reqs):
            return None
        wanted = [int(layer) for layer in os.environ["STATEHOUSE_CAPTURE_LAYERS"].split(",")]
        for parent in worker.model_runner.model.modules():
            layers, norm = getattr(parent, "layers", None), getattr(parent, "norm", None)
            if isinstance(layers, torch.nn.ModuleList) and isinstance(norm, torch.nn.Module):
                try:
                    return cls(layers, norm, wanted)
                except (AttributeError, IndexError):
                    continue
        return None

    def _record_input(self, k):
        def hook(module, args, kwargs):
            value = kwargs.get("hidden_states")
            if value is None:
                value = next((a for a in args if torch.is_tensor(a) and a.is_floating_point()), None)
            self.seen[k] = value.clone() if torch.is_tensor(value) else None

        return hook

    def _record_final(self, module, args, output):
        value = output[0] if isinstance(output, tuple) else output
        self.seen[-1] = value.clone()

    def remove(self):
        for hook in self.hooks:
            hook.remove()

    def errors(self, states, hidden):
        """Relative L2 error of each slot; None where nothing comparable was seen (CUDA graphs, scattered rows)."""
        errors = []
        for k, slot in enumerate(states.split(hidden, dim=1)):
            expected, found = self.seen[k], slot
            try:
                if k < len(self.norms):
                    found = self.norms[k](slot.contiguous())
                if expected is None or expected.shape != found.shape:
                    raise TypeError("not comparable")
                expected = expected.float()
                errors.append(float((found.float() - expected).norm() / expected.norm()))
            except (TypeError, AttributeError, RuntimeError):
                errors.append(None)
        return tuple(errors)
