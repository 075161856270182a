"""Drafts: what a response may go on with, from what other responses to the same prompt said at such a place.

A draft is verified by computing the logits at all of its positions in one pass and drawing each with its own uniform
number; the drawn tokens are kept up to the first that differs. So what is kept are the very tokens that would have been
drawn one by one (speculative decoding without rejection: the randomness of a token is a function of its index).

Invariants:
- a draft decides how many tokens a pass samples, never which;
- what a sequence said itself under older weights is its draft before all others, and is always verified;
- a draft never takes a response past its budget, nor past the row of its KV cache;
- where drafts are expected to gain nothing, as in a batch that fills the machine, none is made, and they are seldom
  looked for; texts are indexed where a draft is looked for, and not before;
- what a drafted token costs is measured, for each size of batch against passes without drafts.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict
from dataclasses import dataclass, field

from april.engines.embedded.sequence import Sequence

ORDERS = (6, 3, 2)
"""Tokens that have to agree before a place counts as like another; the longest run that is found counts."""
PROMPTS, PLACES = 1024, 1 << 20
"""Prompts, and places in the responses to them, that are kept; the prompts begun longest ago go first."""
WORTH = 1.5
"""How many times its cost a drafted token has to be expected to bring before it is drafted."""
FEWEST = 0.05
"""A token that is drawn less often than this is not drafted, however cheap."""
FORGET = 0.98
"""How much less a pass counts in costs and shares than the one behind it."""
RELAX = 0.9995
"""How fast a high cost of a drafted token is doubted again, from pass to pass without drafts."""
PLAIN_EVERY = 16
"""One pass of so many goes without drafts."""
COLD, TRIALS, PROBED = 4, 12, 8
"""The first passes with drafts at a size of batch: some only warm up the kernels, some draft a little whatever it
costs: in large batches at most a token for one sequence of so many."""
PAUSE = 2
"""Drafts that were found and did not pay are not looked for again in one pass, then three, seven, ..., and at most one
for so many sequences: looking takes the longer the more there are, and the next draft may be a better one."""
STRIDE = 1 << 32
"""More than a text has tokens."""
SPREAD = 0.01
"""How far apart places have to be, as a share of their squares, for a line's slope to be taken from them."""
OUTLIER, SMOOTH = 2.0, 0.9
"""A pass counts at most so many times what one of its size usually takes, and how little the newest one moves that."""
PRIOR, RECOVERY = 0.5, 0.001
"""The share of drafted tokens that are drawn, before any was tried, and how fast a low share is doubted again."""


@dataclass(slots=True)
class Past:
    """The responses to one prompt, and where each run of tokens last stood in them."""

    texts: list[list[int]] = field(default_factory=list)
    """Prompts and responses, as far as known."""
    numbers: dict[str, int] = field(default_factory=dict)
    """Which of the texts is a sample's newest."""
    known: list[int] = field(default_factory=list)
    """Tokens of each text that `places` has seen."""
    growing: dict[int, Sequence] = field(default_factory=dict)
    """The samples that had not ended when their texts were last seen."""
    places: dict[tuple[int, ...], int] = field(default_factory=dict)
    """What followed a run of tokens: the number of a text times `STRIDE`, plus the place in it. (A tuple here would be
    one object more for the garbage collector, which takes most of the time then.)"""

    def follow(self, sequence: Sequence) -> None:
        """Its sample goes on, or begins: anew, where it holds less than before, and then its old text stays beside."""
        number = self.numbers.get(sequence.id)
        if number is None or len(sequence.tokens) < self.known[number]:
            number = self.numbers[sequence.id] = len(self.texts)
            self.texts.append(sequence.tokens)
            self.known.append(0)
        self.texts[number] = sequence.tokens
        self.growing[number] = sequence

    def observe(self) -> None:
        """Index what the texts have grown by; the run a text ends with has no continuation yet, and waits."""
        for number, sequence in list(self.growing.items()):
            text = self.texts[number]
            begin, end = self.known[number], len(text)
            if begin < end:
                self.known[number], base = end, number * STRIDE
                for order in ORDERS:
                    for place in range(max(begin, order), end):
                        self.places[tuple(text[place - order : place])] = base + place
            if sequence.finish is not None:
                del self.growing[number]

    def propose(self, tokens: list[int], count: int) -> tuple[int, list[int]]:
        """At most `count` tokens that may follow `tokens`, and the length of the run they were found by."""
        for order in ORDERS:
            found = self.places.get(tuple(tokens[-order:]))
            if found is not None:
                number, place = divmod(found, STRIDE)
                return order, self.texts[number][place : place + count]
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
        past.follow(sequence)
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
        count = len(decoding)
        if not self.longest or not count or not self._costs.try_drafts(count):
            return
        on_trial = self._costs.on_trial(count)
        if on_trial and prefilling:
            return  # nothing would be learned from it
        budget = self._costs.trial(count, self.longest) if on_trial else count * self.longest
        longest, expected, drafted = self._lengths(count), 0.0, []
        for sequence in decoding if longest else ():
            if sequence.replay:
                continue
            if not budget:
                break
            past = self._pasts.get(sequence.prompt)
            room = min(sequence.room, sequence.left)
            if past is None or room <= 0:
                continue
            before = len(past.places)
            past.observe()
            self._places += len(past.places) - before
            order, draft = past.propose(sequence.tokens, room)
            if draft := draft[: min(longest.get(order, 0), budget)]:
                budget -= len(draft)
                sequence.order, sequence.draft = order, draft
                expected += sum(self._accepted[order] ** (j + 1) for j in range(len(draft)))
                drafted.append(sequence)
        if not self._costs.paid(count, sum(len(sequence.draft) for sequence in drafted), expected):
            for sequence in drafted:
                sequence.draft = []

    def _lengths(self, decoding: int) -> dict[int, int]:
        """How long drafts may be, by the length of the run they are found by; empty if none pays.

        A pass without drafts brings `decoding` tokens in so many seconds, so a second is worth so many tokens. The j-th
        token of a draft is drawn with probability share^j, and takes what a drafted token takes.
        """
        price = WORTH * self._costs.token(decoding) * decoding / self._costs.plain(decoding)
        if self._costs.on_trial(decoding):
            price = 0.0
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
    """What passes took lately, in seconds: without drafts, by the sequences that decode; and what drafts add to that.

    What drafts add hangs on the size of the batch (where the weights' way through memory is the limit, a token more is
    next to nothing), so sizes between one power of two and the next have figures of their own.
    """

    def __init__(self) -> None:
        self._plain = Line()
        self._drafts: defaultdict[int, Line] = defaultdict(lambda: Line(from_origin=True))
        self._usual: dict[int, float] = {}
        """Seconds of a pass without drafts, by size of batch."""
        self._passes: Counter[int] = Counter()
        self._tried: Counter[int] = Counter()
        """Passes with drafts."""
        self._pauses: Counter[int] = Counter()
        """The passes in which drafts were not looked for, the last time that they did not pay."""
        self._again: Counter[int] = Counter()
        """The pass from which on they are looked for again."""

    def observe(self, decoding: int, drafted: int, seconds: float) -> None:
        size = decoding.bit_length()
        drafts = self._drafts[size]
        if not drafted:
            usual = self._usual.get(size, seconds)
            seconds = min(seconds, OUTLIER * usual)
            self._usual[size] = SMOOTH * usual + (1 - SMOOTH) * seconds
            self._plain.observe(decoding, seconds)
            drafts.shrink(RELAX)
            return
        if not self.on_trial(decoding):
            seconds = min(seconds, OUTLIER * (self.plain(decoding) + self.drafts(decoding, drafted)))
        self._tried[size] += 1
        if self._tried[size] > COLD and self._plain.weight:
            drafts.observe(drafted, seconds - self.plain(decoding))

    def try_drafts(self, decoding: int) -> bool:
        """Whether drafts are looked for in the pass that begins; some go without, to learn what that takes."""
        size = decoding.bit_length()
        self._passes[size] += 1
        due = self._passes[size] % PLAIN_EVERY != 1 and self._passes[size] >= self._again[size]
        return due and self._plain.weight > 0

    def paid(self, decoding: int, tokens: int, expected: float) -> bool:
        """Whether drafts of so many `tokens` are worth the tokens that are `expected` of them. If not, none are looked
        for in the next passes."""
        size = decoding.bit_length()
        if WORTH * self.drafts(decoding, tokens) > expected * self.plain(decoding) / decoding:
            self._pauses[size] = min(2 * self._pauses[size] + 1, decoding // PAUSE)
            self._again[size] = self._passes[size] + self._pauses[size] + 1
            return False
        if tokens:
            self._pauses[size] = 0
        return True

    def on_trial(self, decoding: int) -> bool:
        """Whether what drafts take in a batch of this size is not known yet."""
        return self._tried[decoding.bit_length()] < TRIALS

    def trial(self, decoding: int, longest: int) -> int:
        """Tokens that a pass on trial drafts in all: sometimes more and sometimes less, never many."""
        return max(1, max(longest, decoding // PROBED) >> self._tried[decoding.bit_length()] % 4)

    def plain(self, decoding: int) -> float:
        """Seconds of a pass without drafts."""
        return max(self._plain.at(decoding), self._usual.get(decoding.bit_length(), 2e-9) / 2)

    def token(self, decoding: int) -> float:
        """Seconds that a drafted token adds; at least what a sequence more does."""
        return max(self._drafts[decoding.bit_length()].slope, self._plain.slope)

    def drafts(self, decoding: int, tokens: int) -> float:
        """Seconds that drafts of so many tokens in all add; nothing as long as they are on trial."""
        if self.on_trial(decoding) or not tokens:
            return 0.0
        return max(self._drafts[decoding.bit_length()].at(tokens), tokens * self.token(decoding))


class Line:
    """A straight line through what was seen lately; it never falls.

    Args:
        from_origin: where it begins if all was seen at one place; else it is level then.
    """

    def __init__(self, from_origin: bool = False) -> None:
        self.from_origin = from_origin
        self.weight = self._x = self._y = self._xx = self._xy = 0.0

    def observe(self, x: float, y: float) -> None:
        self.shrink(1.0, FORGET)
        self.weight += 1
        self._x += x
        self._y += y
        self._xx += x * x
        self._xy += x * y

    def shrink(self, y: float, weight: float = 1.0) -> None:
        """Take what was seen for so much less."""
        self.weight, self._x, self._xx = weight * self.weight, weight * self._x, weight * self._xx
        self._y, self._xy = y * weight * self._y, y * weight * self._xy

    @property
    def slope(self) -> float:
        spread = self._xx * self.weight - self._x * self._x
        if spread > SPREAD * self._xx * self.weight:
            return max(0.0, (self.weight * self._xy - self._x * self._y) / spread)
        return max(0.0, self._y / self._x) if self._x and self.from_origin else 0.0

    def at(self, x: float) -> float:
        return (self._y + self.slope * (self.weight * x - self._x)) / self.weight if self.weight else 0.0
