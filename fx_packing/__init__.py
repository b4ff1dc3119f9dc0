"""fx_packing: ``torch.compile(model, backend="grpo_pack")`` packs padded GRPO batches.

The backend is found by its name; this module holds what else there is: reports, the opt-out, dumps.
"""

from .backend import explain, reset
from .dump import prepare_debug
from .errors import PackingError
from .logprobs import per_token_logps
from .report import Report, report
from .switch import disabled

__all__ = [
    "PackingError", "Report", "disabled", "explain", "per_token_logps", "prepare_debug", "report", "reset",
]  # fmt: skip
__version__ = "0.1.0"
