"""`python -m bridge_fgo ...`, and with it `torchrun -m bridge_fgo run script.py ...`."""

from bridge_fgo.tools.main import app

if __name__ == "__main__":
    app(prog_name="bridge-fgo")
