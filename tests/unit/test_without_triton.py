"""Triton is for GPUs: nothing that starts on a CPU may need it or load a file of kernels."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import importlib, pkgutil, sys
sys.modules["triton"] = None  # importing it now fails
import emberline
KERNELS = ("emberline.ops.triton.", "emberline.train.kernels", "emberline.engine.device_")
OTHERS = ("emberline.__main__", "emberline.engine.xgrammar_backend")  # runs; needs an extra
for module in pkgutil.walk_packages(emberline.__path__, "emberline."):
    if not module.name.startswith(KERNELS + OTHERS):
        importlib.import_module(module.name)
loaded = [name for name in sys.modules if name.startswith(KERNELS)]
assert not loaded, loaded
assert "emberline.server.app" in sys.modules
"""


def test_every_other_module_imports_without_triton() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
