"""A package of models as SGLang takes them from outside (``SGLANG_EXTERNAL_MODEL_PACKAGE``)."""
