"""``ray.get`` of what was called at once: see :mod:`ray.actor`."""

ObjectRef = object


def get(refs, timeout=None):
    """The results; one that is an exception is raised. The calls are over, so no timeout applies."""
    many = isinstance(refs, (list, tuple))
    for result in refs if many else [refs]:
        if isinstance(result, BaseException):
            raise result
    return list(refs) if many else refs
