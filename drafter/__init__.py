"""The EAGLE-3 drafter: its model, its loss, its training and its way into a server. Torch, no Ray.

config.py           the shape, and how it follows from the verifier's
model.py            what one step computes
ttt.py              the unroll over several steps, on packed sequences
verifier_head.py    the teacher; verifier_cache.py keeps what it said
loss.py             soft cross-entropy and fair counts
sampler.py          which sequences make which update
loader.py           packed micro-batches straight from the store
initial.py          the weights it starts from
trainer.py          one update; team.py joins workers
checkpoint.py       whole checkpoints, or none
sources.py          what a run reads, checked
session.py          a run from end to end; train.py is its command line
recipe_file.py      a recipe as train.py reads it
run.py              a run's folder
acceptance.py       how many drafts would be accepted
export.py           to SGLang's folder and back; speculators.py to vLLM's; layer_ids.py counts as they do
"""
