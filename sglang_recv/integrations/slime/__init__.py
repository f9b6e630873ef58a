"""slime: an updater for colocated engines, and the hook that puts it in. Importable without slime.

``--custom-megatron-init-path sglang_recv.integrations.slime.install`` is the way in that changes no source of slime;
docs/slime.md has it from top to bottom.
"""

from sglang_recv.integrations.slime.hook import install
from sglang_recv.integrations.slime.transport import resolve_transport

__all__ = ["install", "resolve_transport"]
