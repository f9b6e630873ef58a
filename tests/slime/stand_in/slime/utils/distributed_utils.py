"""The gloo group of all train ranks."""

_GROUP = None


def get_gloo_group():
    """As slime's."""
    if _GROUP is None:
        raise RuntimeError("the gloo group has not been made")
    return _GROUP


def set_gloo_group(group):
    """As slime's."""
    global _GROUP
    _GROUP = group
