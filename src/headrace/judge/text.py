"""Judgers that compare text: exact, numeric, regex, choice, f1. Right is the task's answer, or any of a list."""

from __future__ import annotations

import re
import string
from abc import abstractmethod
from collections import Counter
from collections.abc import Sequence
from decimal import Decimal, InvalidOperation
from fractions import Fraction
from typing import Any

from headrace.data.episode import Episode
from headrace.data.task import Task
from headrace.data.untrusted import normalized
from headrace.errors import ConfigError, DataError
from headrace.judge.base import Judger, Verdict
from headrace.judge.extract import LONGEST_TEXT, check_where, expected, marked
from headrace.judge.pool import WorkerCrashError, WorkerFailedError, WorkerPool, WorkerTimeoutError
from headrace.utils.threads import call_sync_or_async


class TextJudger(Judger):
    """Scores the reply against each accepted answer; the best score counts, and 1 is correct."""

    async def judge(self, task: Task, episode: Episode) -> Verdict:
        score = await call_sync_or_async(self._best, episode.text, expected(task), task)
        return Verdict(score, is_correct=score >= 1.0)

    def _best(self, text: str, answers: list[Any], task: Task) -> float:
        return max(self.score(text, answer) for answer in answers)

    @abstractmethod
    def score(self, text: str, answer: Any) -> float:
        """From 0 to 1."""


class ExactJudger(TextJudger):
    """1 if the answer is exactly the expected one, apart from white space at both ends."""

    def __init__(self, where: str | list[str] = "text", ignore_case: bool = False, squeeze: bool = False) -> None:
        self._where = check_where(where)
        self._ignore_case = ignore_case
        self._squeeze = squeeze

    def score(self, text: str, answer: Any) -> float:
        given = marked(text, self._where)
        return float(given is not None and self._plain(given) == self._plain(str(answer)))

    def _plain(self, text: str) -> str:
        text = " ".join(text.split()) if self._squeeze else text.strip()
        return text.casefold() if self._ignore_case else text


# ---- numbers ---------------------------------------------------------------------------------------------------------

_MOST_TRIED = 100  # numbers, from the end, that turn out to be none
_DIGITS = 400  # of a number that is read; a longer one is none
# ASCII digits only. Possessive, so that no text makes it go back and forth
_NUMBER = re.compile(
    r"(?<![\w.])(?:[-+−]?[$€£]\s?|[-+−])?(?:(?:\d{1,3}(?:,\d{3})++|\d++)(?:\.\d*+)?|\.\d++)(?:[eE][-+]?\d{1,3}(?!\d))?"
    r"(?:\s?/\s?\d++(?:\.\d++)?)?(?:\s?\\?%)?",
    re.ASCII,
)
_FRACTION = re.compile(r"\\[dt]?frac\s?\{\s?(-?\d{1,400})\s?\}\s?\{\s?(\d{1,400})\s?\}", re.ASCII)


def last_number(text: str) -> tuple[Fraction, bool] | None:
    """The last number of a text, and whether it is a percentage: 1,234.5, -3/4, 12%, $5, 1e-3, \\frac{1}{2}."""
    plain = _FRACTION.sub(r"\1/\2", text).replace("{,}", ",").replace("\\,", "").replace("\\$", "$")
    found = _NUMBER.findall(plain)[-_MOST_TRIED:]
    return next((number for number in map(_to_number, reversed(found)) if number is not None), None)


def _to_number(text: str) -> tuple[Fraction, bool] | None:
    percent = text.endswith("%")
    plain = re.sub(r"[\s,$€£\\%]", "", text).replace("−", "-")
    if len(plain) > _DIGITS:
        return None
    above, _, below = plain.partition("/")
    try:
        value = Fraction(Decimal(above)) / (Fraction(Decimal(below)) if below else 1)
    except (InvalidOperation, ValueError, ZeroDivisionError, OverflowError):
        return None
    return value, percent


class NumericJudger(TextJudger):
    """1 if the number in a box, after ####, in <answer> tags or, without those, the last one of the text is right.

    `tolerance` is absolute, `relative` relative to the expected number. With `percent` 50% is also 0.5.
    """

    def __init__(
        self,
        where: str | list[str] = "auto",
        tolerance: float = 1e-6,
        relative: float = 0.0,
        percent: bool = True,
        marked_only: bool = False,
    ) -> None:
        if tolerance < 0 or relative < 0:
            raise ConfigError(f"tolerance and relative must not be negative, got {tolerance} and {relative}")
        self._where = check_where(where)
        self._tolerance, self._relative = Fraction(tolerance), Fraction(relative)
        self._percent = percent
        self._marked_only = marked_only

    def _best(self, text: str, answers: list[Any], task: Task) -> float:
        wanted = [last_number(str(answer)) for answer in answers]
        if None in wanted:
            raise DataError(f'task "{task.id}": the expected answer {str(task.answer)[:80]!r} is no number')
        given = marked(text, self._where)
        if given is None:
            given = "" if self._marked_only else text[-LONGEST_TEXT:]
        found = last_number(given)
        return float(found is not None and any(self._equal(found, number) for number in wanted if number is not None))

    def score(self, text: str, answer: Any) -> float:
        return self._best(text, [answer], Task("", instruction="", answer=answer))

    def _equal(self, given: tuple[Fraction, bool], wanted: tuple[Fraction, bool]) -> bool:
        margin = max(self._tolerance, self._relative * abs(wanted[0]))
        values = [given[0]]
        if self._percent and given[1] != wanted[1]:  # 50% for 0.5, and 0.5 for 50%
            values.append(given[0] / 100 if given[1] else given[0] * 100)
        return any(abs(value - wanted[0]) <= margin for value in values)


# ---- choices ---------------------------------------------------------------------------------------------------------

_CHOICES = (
    re.compile(r"answer(?:\s+is|\s*[:=])?\s*[:=]?\s*[*_\\$({\[\"']{0,6}(?:text\{)?([A-Ja-j])(?![\w'])", re.IGNORECASE),
    re.compile(r"(?:option|choice)\s*[:=]?\s*[*_({\[\"']{0,4}([A-Ja-j])(?![\w'])", re.IGNORECASE),
    re.compile(r"[(\[]([A-Ja-j])[)\]]"),
    re.compile(r"(?:^|\n)\W{0,4}([A-Ja-j])[.):]", re.ASCII),
    re.compile(r"(?<![\w'])([A-J])(?![\w'])"),
)
_SPACES = re.compile(r"\s+")
_ALONE = re.compile(r"\W{0,8}(?:\\?text\{)?\(?([A-Ja-j])\)?(?:[.):}\s].{0,400})?\W{0,8}", re.DOTALL)


def choice_in(text: str, places: tuple[str, ...] = ("box", "marks", "tags")) -> str | None:
    """The letter that was chosen: in a marked place, after "answer", then in weaker and weaker spellings."""
    given = marked(text, places)
    if given is not None and len(given) < 500 and (alone := _ALONE.fullmatch(given)):
        return alone[1].upper()
    # runs of white space become one character, or the patterns below take quadratic time on them
    tail = _SPACES.sub(lambda run: "\n" if "\n" in run[0] else " ", text[-5_000:]).strip()
    if len(tail) <= 4 and (alone := _ALONE.fullmatch(tail)):
        return alone[1].upper()
    for pattern in _CHOICES:
        if found := pattern.findall(tail):
            return found[-1].upper()
    return None


class ChoiceJudger(TextJudger):
    """1 if the chosen letter is right; the answer is a letter, or the number of the right one counted from 0."""

    def __init__(self, choices: str = "ABCDE", where: str | list[str] = "auto") -> None:
        if not choices or set(choices) - set("ABCDEFGHIJ"):
            raise ConfigError(f'choices must be letters from A to J, got "{choices}"')
        self._choices = choices
        self._where = check_where(where)

    def score(self, text: str, answer: Any) -> float:
        chosen = choice_in(text, self._where)
        return float(chosen is not None and chosen == self._letter(answer))

    def _letter(self, answer: Any) -> str:
        if isinstance(answer, int) and 0 <= answer < len(self._choices):
            return self._choices[answer]
        letter = str(answer).strip().strip("().").upper()
        if len(letter) != 1 or letter not in self._choices:
            raise DataError(f'the expected answer "{str(answer)[:80]}" is none of the choices {self._choices}')
        return letter


# ---- words -----------------------------------------------------------------------------------------------------------

_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def squad_tokens(text: str) -> list[str]:
    """Words in lower case, without punctuation and articles, as SQuAD counts them."""
    plain = normalized("NFC", text).lower().translate(_PUNCTUATION)
    return _ARTICLES.sub(" ", plain).split()


class F1Judger(TextJudger):
    """Token F1 with SQuAD's normalisation. `threshold` is the score from which an answer counts as correct."""

    def __init__(self, where: str | Sequence[str] = ("tags", "text"), threshold: float = 1.0) -> None:
        self._where = check_where(where)
        self._threshold = threshold

    async def judge(self, task: Task, episode: Episode) -> Verdict:
        score = await call_sync_or_async(self._best, episode.text, expected(task), task)
        return Verdict(score, is_correct=score >= self._threshold)

    def score(self, text: str, answer: Any) -> float:
        given, wanted = squad_tokens(marked(text, self._where) or ""), squad_tokens(str(answer))
        if not given or not wanted:
            return float(given == wanted)
        common = sum((Counter(given) & Counter(wanted)).values())
        return 2 * common / (len(given) + len(wanted))


# ---- regular expressions ---------------------------------------------------------------------------------------------


def matches(pattern: str, text: str, flags: int, whole: bool) -> bool:
    """Runs in a worker: a pattern may take for ever."""
    compiled = re.compile(pattern, flags)
    return bool(compiled.fullmatch(text) if whole else compiled.search(text))


class RegexJudger(Judger):
    """1 if the pattern is found. Without `pattern`, the task's answer (or each of a list) is one.

    Patterns run in processes that are killed after `timeout_s`; only the last `longest` characters are looked at.
    """

    def __init__(
        self,
        pattern: str | None = None,
        where: str | list[str] = "text",
        whole: bool = False,
        ignore_case: bool = False,
        longest: int = 20_000,
        timeout_s: float = 2.0,
        workers: int = 1,
    ) -> None:
        if pattern is not None:
            _check_pattern(pattern)
        self._pattern = pattern
        self._where = check_where(where)
        self._whole = whole
        self._flags = int(re.IGNORECASE) if ignore_case else 0
        self._longest = longest
        self._pool = WorkerPool("headrace.judge.text:matches", workers, timeout_s)

    async def judge(self, task: Task, episode: Episode) -> Verdict:
        patterns = [self._pattern] if self._pattern is not None else [str(answer) for answer in expected(task)]
        given = marked(episode.text, self._where)
        late = False
        for pattern in patterns if given is not None else ():
            try:
                found = await self._pool.call(pattern, (given or "")[-self._longest :], self._flags, self._whole)
            except (WorkerTimeoutError, WorkerCrashError):
                late, found = True, False
            except WorkerFailedError as error:
                raise DataError(f'task "{task.id}": the pattern {pattern[:80]!r} cannot be used: {error}') from None
            if found:
                return Verdict(1.0, is_correct=True, metrics={"judge_timed_out": float(late)})
        return Verdict(0.0, is_correct=False, metrics={"judge_timed_out": float(late)})

    async def close(self) -> None:
        """End the workers."""
        await self._pool.close()


def _check_pattern(pattern: str) -> None:
    try:
        re.compile(pattern)
    except re.error as error:
        raise ConfigError(f'the pattern "{pattern}" is no regular expression: {error}') from None
