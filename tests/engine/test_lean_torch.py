"""The lean import in processes of its own: what is deferred loads on use, once, and a forward uses none."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "src"

PREPARE = """
import sys
from hotstart.engine import lean_torch
how = lean_torch.import_torch()
deferred = lambda: {n for n, m in list(sys.modules.items()) if type(m) is lean_torch._Deferred}
"""


def run(script: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", PREPARE + textwrap.dedent(script)],
        env={**os.environ, "PYTHONPATH": str(SOURCE), **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )


def succeeds(script: str, **environment: str) -> None:
    result = run(script, **environment)
    assert result.returncode == 0, result.stderr


def test_forward_and_sampling_load_nothing_that_was_deferred() -> None:
    succeeds("""
        assert how == "lean"
        before = deferred()
        assert before >= {"torch._meta_registrations", "torch.export", "torch.optim", "torch.distributions"}
        import torch
        from torch.nn.functional import scaled_dot_product_attention
        from hotstart.device.generator import new_generator
        with torch.inference_mode():
            x = torch.randn(3, 8).to(torch.bfloat16)
            hidden = torch.addmm(x, x, torch.randn(8, 8).to(torch.bfloat16)).view(1, 2, 3, 4)
            out = scaled_dot_product_attention(hidden, hidden, hidden, is_causal=True)
            logits = out.float().flatten(0, 2).log_softmax(-1)
            generator = new_generator(torch.device("cpu")).manual_seed(3)
            noise = torch.empty_like(logits).exponential_(generator=generator)
            logits.topk(2), (logits / noise).argmax(-1), logits.cumsum(-1), torch.cat([logits, noise])
        assert deferred() == before
        assert "torch._prims.rng_prims" not in sys.modules
        """)


def test_deferred_modules_load_on_first_access() -> None:
    succeeds("""
        import torch
        assert "torch.optim" in deferred() and "torch.utils.data" in deferred()
        weight = torch.nn.Parameter(torch.ones(3))
        optimizer = torch.optim.Adam([weight], lr=0.1)
        weight.sum().backward()
        optimizer.step()
        assert weight[0] < 1
        assert "torch.optim" not in deferred()
        loader = torch.utils.data.DataLoader([1, 2, 3], batch_size=3)
        assert next(iter(loader)).tolist() == [1, 2, 3]
        assert callable(torch.onnx.export) and callable(torch.export.export)
        assert "Normal" in dir(torch.distributions)
        """)


def test_every_form_of_import_finds_one_and_the_same_module() -> None:
    # The submodule first: its parent imports it while it is being imported.
    succeeds("""
        import torch.optim.lr_scheduler as scheduler
        from torch.optim import lr_scheduler
        from torch.optim.swa_utils import LRScheduler
        import torch
        assert torch.optim.lr_scheduler is scheduler is lr_scheduler
        assert scheduler.LRScheduler is LRScheduler
        assert scheduler.__spec__.loader.__class__.__name__ == "SourceFileLoader"

        from torch.utils.data.dataloader import DataLoader as by_submodule
        from torch.utils.data import DataLoader as by_package
        assert by_submodule is by_package

        from torch.distributions.normal import Normal
        from torch.distributions import kl_divergence  # looks Normal up in a registry of classes
        assert kl_divergence(Normal(0.0, 1.0), Normal(0.0, 1.0)) == 0
        """)


def test_compile_loads_what_it_needs() -> None:
    succeeds("""
        import torch
        assert torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2)).tolist() == [2, 2]
        import torch.sparse.semi_structured, torch.ao.quantization, torch.testing
        """)


def test_switch_imports_everything_at_once() -> None:
    succeeds(
        """
        assert how == "plain (HOTSTART_LEAN_TORCH=0)"
        assert not deferred() and "torch.optim.adam" in sys.modules
        assert lean_torch.import_torch() == "already imported"
        """,
        HOTSTART_LEAN_TORCH="0",
    )


def test_torch_that_cannot_be_imported_is_an_error_that_names_the_switch(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise RuntimeError('libtorch is from another planet')\n")
    result = run("", PYTHONPATH=f"{tmp_path}{os.pathsep}{SOURCE}")
    assert result.returncode != 0
    assert "EngineError: torch could not be imported: RuntimeError: libtorch is from another planet" in (
        result.stderr
    )
    assert "HOTSTART_LEAN_TORCH=0" in result.stderr
