"""Handles of actors that live in this process."""


class _Method:
    def __init__(self, method):
        self._method = method

    def remote(self, *args, **kwargs):
        """Call now; an exception is the result, as it is Ray's to raise it in ``get``."""
        try:
            return self._method(*args, **kwargs)
        except Exception as error:
            return error


class ActorHandle:
    """What slime holds of an engine: each method has ``.remote()``."""

    def __init__(self, actor):
        self._actor = actor

    def __getattr__(self, name):
        return _Method(getattr(self._actor, name))
