# Commands for people who work on bridge_fgo; `just` lists them.

default:
    @just --list

# The CPU lane, as CI runs it.
test *ARGS:
    uv run pytest -n 2 --dist worksteal {{ARGS}}

# The GPU lane: needs CUDA, Transformer Engine and Megatron-Bridge in the environment of PYTHON.
test-gpu PYTHON="python3" *ARGS="":
    {{PYTHON}} -m pytest -m gpu tests/gpu {{ARGS}}

# The same with late copies and poisoned memory; see tests/debug_transfers.py.
test-gpu-debug PYTHON="python3" *ARGS="":
    BRIDGE_FGO_DEBUG=1 {{PYTHON}} -m pytest -m gpu tests/gpu {{ARGS}}

# Sleeps and wakes by a framework's own functions (NAME: verl, skyrl or nemo_rl; PATH: a checkout), before and after
# `install(frameworks=...)`: seconds, bytes, bits. Without a GPU a tiny model.
framework NAME PATH PYTHON="uv run python" *ARGS="":
    PYTHONPATH=tests {{PYTHON}} -m harness.sleeps {{NAME}} {{PATH}} {{ARGS}}

# Lint, format, types and the direction of imports.
check:
    uv run ruff check .
    uv run ruff format --check .
    uv run pyright
    uv run lint-imports --no-cache --no-logo

# What is said of every config that the installed Bridge ships, by reason. No GPU.
reach:
    uv run python tests/tools/reach.py

# The CPU lane on a Megatron-LM checkout (generation 1 or 2 of mcore's offloader) instead of the released mcore.
mcore-dev PATH:
    BRIDGE_FGO_MEGATRON_LM={{PATH}} uv run pytest tests/upstream/test_checkout.py

# The CPU lane on checkouts of Bridge (its `main`, say) and of the Megatron-LM that it pins; lists what no longer binds.
bridge-main BRIDGE MEGATRON_LM *ARGS:
    uv run python tests/upstream/checkouts.py {{BRIDGE}} {{MEGATRON_LM}} {{ARGS}}

# Upstream's own tests without and with this package; PATH: a checkout of Megatron-Bridge, or of Megatron-LM (on RANKS);
# TESTS: which, as paths in it.
upstream PATH RANKS="1" *TESTS="":
    uv run python tests/upstream/suite.py {{PATH}} {{RANKS}} {{TESTS}}

# The series in patches/ on copies of the installed wheel; its own tests and tests/bridge on the patched one.
patches:
    uv run pytest tests/patches
