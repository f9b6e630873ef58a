"""Block fp8 as an H200 keeps it, on a CPU. Imported by SGLang, in servers only, as a package of external models.

SGLang's CPU path packs fp8 weights for AMX, and does not start without it. What it does on a GPU to weights while it
loads them is plain torch, so it runs here as well; a forward does not. These are the two modules that ask.
"""

from sglang.srt.layers.quantization import fp8
from sglang.srt.models.deepseek_common import deepseek_weight_loader

fp8._is_cpu = False
deepseek_weight_loader._is_cuda = True
