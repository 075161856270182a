"""Drafts: what a response may go on with, from what other responses to the same prompt said at such a place.

A draft is verified by computing the logits at all of its positions in one pass and drawing each with its own uniform
number; the drawn tokens are kept up to the first that differs. So what is kept are the very tokens that would have been
drawn one by one (speculative decoding without rejection: the randomness of a token is a function of its index).

Invariants:
- a draft decides how many tokens a pass samples, never which;
- what a sequence said itself under older weights is its draft before all others, and is always verified;
- a draft never takes a response past its budget, nor past the row of its KV cache;
- where drafts are expected to gain nothing, as in a batch that fills the machine, none is made; what a drafted token
  costs is measured, for each size of batch against passes without drafts.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from dataclasses import dataclass, field

from april.engines.embedded.sequence import Sequence

ORDERS = (6, 3, 2)
"""Tokens that have to agree before a place counts as like another; the longest run that is found counts."""
PROMPTS, PLACES = 1024, 1 << 20
"""Prompts, and places in the responses to them, that are kept; the prompts begun longest ago go first."""
WORTH = 1.2
"""How many times its cost a drafted token has to be expected to bring before it is drafted."""
FEWEST = 0.05
"""A token that is drawn less often than this is not drafted, however cheap."""
FORGET = 0.98
"""How much less a pass counts in costs and shares than the one behind it."""
RELAX = 0.9995
"""How fast a high cost of a drafted token is doubted again, from pass to pass without drafts."""
PLAIN_EVERY = 16
"""One pass of so many goes without drafts."""
COLD, TRIALS = 8, 24
"""The first passes with drafts at a size of batch: some only warm up the kernels, the next draft whatever it costs."""
FEW, OUTLIER = 4, 2.0
"""A pass counts at most so many times what it was expected to take, once a few have been seen."""
PRIOR, RECOVERY = 0.5, 0.001
"""The share of drafted tokens that are drawn, before any was tried, and how fast a low share is doubted again."""


@dataclass(slots=True)
class Past:
    """The responses to one prompt, and where each run of tokens last stood in them."""

    texts: dict[str, list[int]] = field(default_factory=dict)
    """Prompt and response by sample, as far as known."""
    known: dict[str, int] = field(default_factory=dict)
    """Tokens of each that `places` has seen."""
    places: dict[tuple[int, ...], tuple[list[int], int]] = field(default_factory=dict)
    """What followed a run of tokens: a text, and the place in it."""

    def observe(self) -> None:
        """Index what the texts have grown by; the run a text ends with has no continuation yet, and waits."""
        for id, text in self.texts.items():
            begin, end = self.known[id], len(text)
            if begin == end:
                continue
            self.known[id] = end
            for order in ORDERS:
                for place in range(max(begin, order), end):
                    self.places[tuple(text[place - order : place])] = (text, place)

    def propose(self, tokens: list[int], count: int) -> tuple[int, list[int]]:
        """At most `count` tokens that may follow `tokens`, and the length of the run they were found by."""
        for order in ORDERS:
            found = self.places.get(tuple(tokens[-order:]))
            if found is not None:
                text, place = found
                return order, text[place : place + count]
        return 0, []


class Drafter:
    """Makes drafts for the sequences of an engine, as long as they pay.

    Args:
        longest: tokens of a draft at most; 0 makes none.
    """

    def __init__(self, longest: int) -> None:
        self.longest = longest
        self._pasts: OrderedDict[tuple[int, ...], Past] = OrderedDict()
        self._places = 0
        self._replays = False
        self._costs = PassCosts()
        self._accepted = dict.fromkeys(ORDERS, PRIOR)
        """Share of drafted tokens that were drawn, by the length of the run they were found by."""

    def follow(self, sequence: Sequence) -> None:
        """What `sequence` holds, and will hold, may serve as drafts."""
        self._replays |= bool(sequence.replay)
        if not self.longest:
            return
        past = self._pasts.setdefault(sequence.prompt, Past())
        self._pasts.move_to_end(sequence.prompt)
        past.texts[sequence.id] = sequence.tokens
        past.known[sequence.id] = min(past.known.get(sequence.id, 0), len(sequence.tokens))
        while len(self._pasts) > PROMPTS or (self._places > PLACES and len(self._pasts) > 1):
            _, oldest = self._pasts.popitem(last=False)
            self._places -= len(oldest.places)

    def draft(self, decoding: list[Sequence], prefilling: int, most: int) -> None:
        """Give decoding sequences drafts for the pass that begins, in which `prefilling` tokens take part besides.

        Args:
            most: tokens that may be prefilled, or verified of sequences that say again what they said before.
        """
        for sequence in decoding if self._replays else ():
            if not sequence.replay:
                continue
            place = len(sequence.tokens)
            sequence.draft = list(sequence.replay[place : place + min(sequence.room, sequence.left, most - prefilling)])
            sequence.order = 0
            prefilling += len(sequence.draft)
        longest = self._lengths(len(decoding)) if self.longest and decoding else {}
        for sequence in decoding if longest else ():
            if sequence.replay:
                continue
            past = self._pasts.get(sequence.prompt)
            room = min(sequence.room, sequence.left)
            if past is None or room <= 0:
                continue
            before = len(past.places)
            past.observe()
            self._places += len(past.places) - before
            sequence.order, draft = past.propose(sequence.tokens, room)
            sequence.draft = draft[: longest.get(sequence.order, 0)]

    def _lengths(self, decoding: int) -> dict[int, int]:
        """How long drafts may be, by the length of the run they are found by; empty if none pays.

        A pass without drafts brings `decoding` tokens in so many seconds, so a second is worth so many tokens. The j-th
        token of a draft is drawn with probability share^j, and takes what a drafted token takes.
        """
        seconds = self._costs.token(decoding)
        if seconds is None:
            return {}
        price = WORTH * seconds * decoding / self._costs.plain(decoding)
        found = {}
        for order, share in self._accepted.items():
            length = next((j for j in range(self.longest) if share ** (j + 1) < max(price, FEWEST)), self.longest)
            if length:
                found[order] = length
        return found

    def learn(self, drawn: dict[Sequence, int], decoding: int, prefilling: int, seconds: float) -> None:
        """A pass took so long, and drew so many tokens for each sequence that had a draft.

        Args:
            decoding: sequences that it drew a token for, drafts apart.
            prefilling: tokens of prompts, and of what is said again, that took part.
        """
        drafted = sum(len(sequence.draft) for sequence in drawn)
        if self.longest and decoding and not prefilling and all(sequence.order for sequence in drawn):
            self._costs.observe(decoding, drafted, seconds)
        for order, share in self._accepted.items():
            self._accepted[order] = share + RECOVERY * max(0.0, PRIOR - share)
        for sequence, count in drawn.items():
            agreed = min(count - 1, len(sequence.draft))
            tried = min(agreed + 1, len(sequence.draft))
            if sequence.order:
                weight = FORGET**tried
                self._accepted[sequence.order] = weight * self._accepted[sequence.order] + (1 - weight) * agreed / tried
            sequence.draft = []


class PassCosts:
    """What passes took lately: without drafts, a straight line by the sequences that decode; and a drafted token.

    A drafted token takes what its pass took longer than one without drafts, and its share of what drafts take at all.
    That hangs on the size of the batch (where the weights' way through memory is the limit, it is next to nothing), so
    sizes between one power of two and the next have a figure of their own.
    """

    def __init__(self) -> None:
        self._sums = [0.0] * 5
        self._drafted: dict[int, tuple[float, float]] = {}
        """Seconds that passes with drafts took longer, and tokens drafted in them."""
        self._passes: Counter[int] = Counter()
        self._tried: Counter[int] = Counter()
        """Passes with drafts."""

    def observe(self, decoding: int, drafted: int, seconds: float) -> None:
        size = decoding.bit_length()
        if self._sums[0] > FEW:
            seconds = min(seconds, OUTLIER * (self.plain(decoding) + drafted * self._token(size)))
        self._tried[size] += bool(drafted)
        if not drafted:
            terms = (1.0, decoding, seconds, decoding * decoding, decoding * seconds)
            self._sums = [FORGET * old + new for old, new in zip(self._sums, terms, strict=True)]
            if size in self._drafted:
                longer, tokens = self._drafted[size]
                self._drafted[size] = RELAX * longer, tokens
        elif self._sums[0] and self._tried[size] > COLD:
            longer, tokens = self._drafted.get(size, (0.0, 0.0))
            self._drafted[size] = FORGET * longer + seconds - self.plain(decoding), FORGET * tokens + drafted

    def token(self, decoding: int) -> float | None:
        """Seconds that a drafted token takes in the pass that begins, which decodes so many sequences; None if it is to
        go without, to learn what that takes."""
        size = decoding.bit_length()
        self._passes[size] += 1
        if not self._sums[0] or self._passes[size] % PLAIN_EVERY == 1:
            return None
        return self._token(size) if self._tried[size] > TRIALS else 0.0

    def _token(self, size: int) -> float:
        longer, tokens = self._drafted.get(size, (0.0, 1.0))
        return max(longer / tokens, self._slope)

    def plain(self, decoding: int) -> float:
        """Seconds of a pass without drafts."""
        weight, x, y, _, _ = self._sums
        return max(1e-9, y / weight + self._slope * (decoding - x / weight))

    @property
    def _slope(self) -> float:
        """Seconds that a sequence more takes; never less than none, which it is while all batches have one size."""
        weight, x, y, xx, xy = self._sums
        spread = xx * weight - x * x
        return max(0.0, (weight * xy - x * y) / spread) if spread > 0.01 * xx * weight else 0.0
