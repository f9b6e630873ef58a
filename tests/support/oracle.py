"""What an engine says with certain weights, and how to compare two such answers.

The strongest statement about an update is behavioural: after it the engine says exactly what an engine says that has
read the same weights from disk. :func:`greedy` asks a server, :func:`reference` asks transformers, an independent
implementation.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from support.server import EngineServer

PROMPT: tuple[int, ...] = (256, *b"The weights of this model are")
"""A begin token and the bytes of a text: what the tests' tokenizer makes of it."""

TOKENS = 12

ACROSS_IMPLEMENTATIONS = 0.25
"""How far log probabilities may be apart where sums are taken in another order: eight steps of bfloat16 from 4 to 8,
where these models' largest logits lie."""


@dataclass(frozen=True)
class Answer:
    """Greedy tokens, each with its log probability."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]


def greedy(server: EngineServer, prompt: str | Sequence[int] = PROMPT, tokens: int = TOKENS) -> Answer:
    """Ask a server."""
    answer = server.generate(prompt, tokens, return_logprob=True)
    pairs = [(int(entry[1]), float(entry[0])) for entry in answer["meta_info"]["output_token_logprobs"]]
    return Answer(tuple(token for token, _ in pairs), tuple(logprob for _, logprob in pairs))


def reference(path: Path, prompt: Sequence[int] = PROMPT, tokens: int = TOKENS) -> Answer:
    """Ask transformers, in this process, with a checkpoint. The first call imports it, which takes seconds."""
    score = _scorer(path)
    said = list(prompt)
    logprobs: list[float] = []
    for _ in range(tokens):
        # Without a cache: a plain forward for each token leaves nothing to get wrong.
        best = score(said)[-1].max(-1)
        said.append(int(best.indices))
        logprobs.append(float(best.values))
    return Answer(tuple(said[len(prompt) :]), tuple(logprobs))


def assert_follows(
    answer: Answer, path: Path, what: str, *, prompt: Sequence[int] = PROMPT, tolerance: float = ACROSS_IMPLEMENTATIONS
) -> None:
    """Each token is the best one, or as good as the best, by transformers with this checkpoint, and as probable.

    Unlike a comparison of tokens this doesn't depend on which of two equally good tokens a processor's rounding picks.
    """
    scores = _scorer(path)([*prompt, *answer.tokens])
    for step, (token, logprob) in enumerate(zip(answer.tokens, answer.logprobs, strict=True)):
        # What stands at a position predicts the next one.
        expected = scores[len(prompt) - 1 + step]
        there = float(expected[token])
        lost = float(expected.max()) - there
        assert lost <= tolerance, (
            f"{what}: token {step} is {token}, {lost:g} less probable than {int(expected.argmax())}"
        )
        assert abs(there - logprob) <= tolerance, f"{what}: token {step}: log probability {logprob:g}, not {there:g}"


def _scorer(path: Path) -> Callable[[Sequence[int]], torch.Tensor]:
    """A checkpoint as a function from token ids to the log probabilities after each of them."""
    with warnings.catch_warnings():
        # What transformers warns about in its own code is not ours to fix.
        warnings.simplefilter("ignore")
        import transformers

        model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)

    def score(ids: Sequence[int]) -> torch.Tensor:
        with torch.inference_mode(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            scores: torch.Tensor = model(torch.tensor([list(ids)]), use_cache=False).logits[0].float().log_softmax(-1)
        return scores

    return score


def assert_same(actual: Answer, expected: Answer, what: str, *, tolerance: float = 0.0) -> None:
    """The same tokens, and log probabilities within a tolerance.

    Two servers of one version and TP size agree bit for bit (the default). Across versions, TP sizes or
    implementations, sums are taken in another order: give a tolerance.
    """
    assert actual.tokens == expected.tokens, f"{what}: other tokens: {actual.tokens} instead of {expected.tokens}"
    worst = max((abs(a - b) for a, b in zip(actual.logprobs, expected.logprobs, strict=True)), default=0.0)
    assert worst <= tolerance, f"{what}: same tokens, but a log probability is {worst:g} off ({tolerance:g} allowed)"


def assert_differ(left: Answer, right: Answer, what: str) -> None:
    """Other tokens: a test that replaces weights must first be able to see the difference."""
    assert left.tokens != right.tokens, f"{what}: both say {left.tokens}, so nothing can be told from the tokens"
