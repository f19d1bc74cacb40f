"""Reinforcement learning on a shared GPU, small enough to copy from: GRPO with Bridge, mcore's engine and `Residency`.

`loop.py` is the loop. Beside it: `task.py` (prompts, rewards, advantages and the loss), `trainer.py` (Bridge's setup,
`train_step`, log-probabilities, and rollouts by mcore's inference engine on the trainer's own weights),
`neighbour.py` (a second process that takes what a sleep gives back). `arm.py` is a run in a process.
"""
