"""Entry point of the SGLang plugin (group ``sglang.srt.plugins``), called in every process that loads plugins."""

from __future__ import annotations

import sys


def register() -> None:
    """Register the hooks that this process needs.

    HookRegistry imports what it hooks, and a detokenizer or a command line has no use for SGLang's engine, so hooks are
    registered for modules that are already imported. Where the engine is imported later (SGLang's own command lines),
    the hook on the command line registers the rest.
    """
    from sglang_recv.integrations.sglang import server

    server.register_flag()
    if "sglang.srt.entrypoints.engine" in sys.modules:
        server.register()
    if "sglang.srt.managers.scheduler" in sys.modules:
        from sglang_recv.integrations.sglang import scheduler

        scheduler.register()
