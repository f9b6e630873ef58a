"""The SGLang plugin: the only place that imports SGLang."""
