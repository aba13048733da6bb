"""The EAGLE-3 drafter: its model, its loss and its way into a server. Torch, no Ray.

config.py         the shape, and how it follows from the verifier's
model.py          what one step computes
ttt.py            the unroll over several steps, on packed sequences
verifier_head.py  the teacher
loss.py           soft cross-entropy and fair counts
export.py         to SGLang's folder and back
"""
