from __future__ import annotations

import asyncio
import math
import threading

import pytest

from april.rollout.rewards import RewardError, described
from april.rollout.trajectory.reward import Reward
from april.tasks import length
from april.tasks.math import math_verify
from april.tasks.reward_function import NamedFunction, load_function
from april.tasks.scoring import SpecScorer
from april.tasks.task import Problem, TaskSpec

PROBLEM = Problem("p1", "2 + 2?", "4", {"level": 3, "source": "book"})

FUNCTIONS = """
import asyncio

def exact(response, answer):
    return float(response == answer)

def by_level(text, gold, *, level):
    return level * (text == gold)

def shortness(response):
    return -len(response)

def everything(response, **offered):
    return len(offered)

async def patient(response, answer, source):
    await asyncio.sleep(0)
    return 1.0 if source == "book" else 0.0

def ranks(responses, answer):
    return [sorted(responses).index(r) for r in responses]
ranks.reward_scope = "group"

def plain_ranks(responses, answer):
    return [sorted(responses).index(r) for r in responses]

def brevity(response, *, length):
    return -length

def judged(response, answer):
    from april import Reward
    return Reward(0.5, {"fluent": 0.25, "why": "terse"})

def needs_more(response, answer, difficulty):
    return 0.0

class Judge:
    def __call__(self, response, answer):
        return 0.5
judge = Judge()

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    right = float(solution_str == str(ground_truth) and data_source == "book" and extra_info == {"split": "train"})
    return {"score": right, "acc": bool(right)}

def brief_score(solution_str, ground_truth, method="strict"):
    return float(solution_str == ground_truth and method == "strict")

def accuracy(prompts, completions, completion_ids, source, answer, **kwargs):
    texts = [c if isinstance(c, str) else c[0]["content"] for c in completions]
    assert len(texts) == len(prompts) == len(source) == len(kwargs["level"])
    return [None if t == "?" else float(t == a) + len(i or ()) for t, a, i in zip(texts, answer, completion_ids)]

async def graded(completions, solution): return [float(c == s) for c, s in zip(completions, solution)]

def of_column(source, response): return 1.0
def answer_first(answer, response): return 1.0
def response_second(question, response): return 1.0
def level_second(response, level): return 1.0
def misspelt(response, answer, sorce): return 1.0
def by_response(responses, answer): return {response: 1.0 for response in responses}

def dist(response, answer): return 0.0
def nothing(response, answer): return None
def not_a_number(response, answer): return float("nan")
def too_few(responses, answer): return [1.0]
number = 3
"""


@pytest.fixture(autouse=True)
def my_rewards(tmp_path, monkeypatch):
    """A module of the user's in the current directory, which is not on `sys.path`."""
    (tmp_path / "my_rewards.py").write_text(FUNCTIONS)
    (tmp_path / "broken_rewards.py").write_text("import a_module_that_is_missing\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [p for p in __import__("sys").path if p])
    yield
    __import__("sys").modules.pop("my_rewards", None)


def scorer(reward: str, **settings) -> SpecScorer:
    return SpecScorer(TaskSpec("reasoning_gym", "gcd", reward=reward, **settings))


@pytest.mark.parametrize(
    ("name", "response", "reward"),
    [
        ("exact", "4", 1.0),
        ("exact", "5", 0.0),
        ("by_level", "4", 3.0),
        ("shortness", "four", -4.0),
        ("everything", "4", 6.0),
        ("patient", "4", 1.0),
        ("brevity", "4", -9.0),
        ("judge", "4", 0.5),
    ],
)
def test_a_function_gets_the_arguments_of_its_signature(name, response, reward):
    score = scorer(f"my_rewards:{name}")
    assert score.scope == "sample"
    assert score(PROBLEM, [response], lengths=[9]) == [Reward(reward)]


def test_module_dot_function_works_too():
    assert load_function("my_rewards.exact") is load_function("my_rewards:exact")
    assert load_function("math:dist") is math.dist


def test_functions_without_a_signature_get_response_and_answer():
    function = NamedFunction("builtins:max")
    assert function.signature is None
    assert function(PROBLEM, "3") == "4"


@pytest.mark.parametrize(("name", "settings"), [("ranks", {}), ("plain_ranks", {"reward_scope": "group"})])
def test_whole_group_rewards(name, settings):
    score = scorer(f"my_rewards:{name}", **settings)
    assert score.scope == "group"
    assert score(PROBLEM, ["c", "a", "b"]) == [Reward(2.0), Reward(0.0), Reward(1.0)]


def test_several_rewards_are_weighed_and_named():
    weights = {"my_rewards:exact": 1.0, "my_rewards:ranks": 0.1, "my_rewards:judged": 2, "april.tasks.format:boxed": 0}
    score = SpecScorer(TaskSpec("reasoning_gym", "gcd", rewards=weights))
    assert (score.scope, score.correct_at) == ("group", None)
    said = {"judged": 0.5, "judged/fluent": 0.25, "judged/why": "terse", "boxed": 0.0}
    assert score(PROBLEM, ["4", "3"]) == [
        Reward(pytest.approx(2.1), {"exact": 1.0, "ranks": 1.0, **said}),
        Reward(1.0, {"exact": 0.0, "ranks": 0.0, **said}),
    ]
    assert scorer("my_rewards:judged")(PROBLEM, ["4"]) == [Reward(0.5, {"fluent": 0.25, "why": "terse"})]


def test_parts_with_equal_names_are_identified_by_path():
    weights = {"my_rewards:dist": 1.0, "my_rewards.dist": 1.0}
    score = SpecScorer(TaskSpec("reasoning_gym", "gcd", rewards=weights))
    assert list(score(PROBLEM, ["4"])[0].info) == list(weights)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"reward": "math-verify", "rewards": {"my_rewards:exact": 1.0}}, "rewards are set too"),
        ({"rewards": {"math-verify": math.nan}}, "weights must be finite"),
    ],
)
def test_wrong_weights(settings, message):
    with pytest.raises(ValueError, match=message):
        TaskSpec("reasoning_gym", "gcd", **settings)


@pytest.mark.parametrize(
    ("form", "kept", "broken"),
    [
        ("boxed", ["So\n\\boxed{4}", "It is $\\boxed{ 4 }$."], ["\\boxed{4}\nor so", "\\boxed{}", "4", ""]),
        (
            "answered",
            ["think <answer>4</answer>\n", "<answer>4\n5</answer>"],
            ["<answer>4</answer> or 5", "<answer></answer>", "<answer>4</answer><answer>5</answer>", "4"],
        ),
        (
            "thought",
            ["<think>2 and 2</think>4", "2 and 2\n</think>\n\n4\n"],
            [
                "<think>2 and 2</think>\n",
                "<think></think>4",
                "<think> </think>4",
                "4",
                "a</think>b</think>c",
                "a<think>b</think>c",
            ],
        ),
    ],
)
def test_forms(form, kept, broken):
    function = load_function(f"april.tasks.format:{form}")
    assert [function(response) for response in kept] == [1.0] * len(kept)
    assert [function(response) for response in broken] == [0.0] * len(broken)


def test_brevity():
    assert length.per_thousand("", None, 500) == -0.5
    assert length.relative(["a", "b", "c"], None, [10, 30, 20]) == [0.5, -0.5, 0.0]
    assert length.relative(["a", "b"], None, [7, 7]) == [0.0, 0.0]
    assert length.repetition("a b c d e f") == length.repetition("a b") == 0.0
    assert length.repetition("so it goes on " * 25) == pytest.approx(-93 / 97)


async def test_an_async_function_is_scored_from_a_thread_of_a_running_loop():
    assert await asyncio.to_thread(scorer("my_rewards:patient"), PROBLEM, ["4"]) == [Reward(1.0)]


@pytest.mark.parametrize("name", ["nothing", "not_a_number"])
def test_rewards_that_are_no_finite_numbers_name_the_problem(name):
    with pytest.raises(RewardError, match=f"problem 'p1', reward 'my_rewards:{name}'.*no finite number"):
        scorer(f"my_rewards:{name}")(PROBLEM, ["4"])


def test_a_group_reward_of_the_wrong_length_names_the_problem():
    with pytest.raises(RewardError, match=r"problem 'p1'.*1 rewards for 2 samples"):
        scorer("my_rewards:too_few", reward_scope="group")(PROBLEM, ["4", "5"])


def test_a_parameter_without_a_column_is_found_before_training():
    with pytest.raises(ValueError, match=r"^reward = 'my_rewards:needs_more': .*'difficulty'; .* offers answer"):
        scorer("my_rewards:needs_more").check([PROBLEM])


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("my_reward:exact", "no module 'my_reward'"),
        ("my_rewards.sub:exact", "no module 'my_rewards.sub'"),
        ("my_rewards:exakt", "my_rewards.py has no 'exakt'"),
        ("my_rewards:number", "a int, which cannot be called"),
        ("exact", 'must be "task", "math-verify" or a function'),
        ("my_rewards:", "must be"),
    ],
)
def test_errors_of_wrong_paths_name_the_missing_part(path, message):
    with pytest.raises(ValueError, match=message):
        scorer(path)


def test_a_failed_import_inside_the_module_names_the_missing_package():
    with pytest.raises(ValueError, match=r"importing it failed: ModuleNotFoundError: .*a_module_that_is_missing"):
        scorer("broken_rewards:exact")


def test_extract_is_refused_with_a_user_function():
    with pytest.raises(ValueError, match="extract = 'tag'"):
        scorer("my_rewards:exact", extract="tag")


@pytest.mark.parametrize(
    ("answer", "response", "reward"),
    [
        ("4", "so it is \\boxed{4}", 1.0),
        ("4", "The answer is 4.", 1.0),
        ("4", "4, no: 5", 0.0),
        ("4", "no idea", 0.0),
        ("4", "", 0.0),
        ("1/2", "$\\frac{2}{4}$", 1.0),
        ("1/2", "0.5", 1.0),
        ("1,234", "\\boxed{1234}", 1.0),
        ("2x+3", "$3 + 2x$", 1.0),
        ("2x+3", "$2$", 0.0),
        ("$2x+3$", "$3 + 2x$", 1.0),
        ("\\boxed{\\sqrt{2}}", "$2^{1/2}$", 1.0),
        ("5\\pi", "\\boxed{5}", 0.0),
        ("\\{1,2\\}", "\\boxed{\\{2,1\\}}", 1.0),
        ("\\text{Friday}", "\\boxed{Friday}", 1.0),
        ("She sells 16 - 3 = 13 eggs.\n#### 13", "13 eggs", 1.0),
        ("She sells 16 - 3 = 13 eggs.\n#### 13", "16", 0.0),
        ("\\$18.90", "\\boxed{18.9}", 1.0),
    ],
)
def test_math_verify_compares_by_meaning(answer, response, reward):
    assert math_verify(Problem("m", "?", answer), response) == reward


def test_math_verify_reads_the_tag_on_request():
    assert scorer("math-verify", extract="tag")(PROBLEM, ["5 <answer>4</answer>", "4"]) == [Reward(1.0), Reward(0.0)]


def test_math_verify_scores_in_any_thread():
    rewards = []
    thread = threading.Thread(target=lambda: rewards.append(math_verify(PROBLEM, "\\boxed{4}")))
    thread.start()
    thread.join()
    assert rewards == [1.0]


@pytest.mark.parametrize("answer", [None, "", "####"])
def test_a_problem_without_a_readable_answer_is_named(answer):
    with pytest.raises(RewardError, match="problem 'm': math-verify finds no answer"):
        math_verify(Problem("m", "?", answer), "4")


BOOK = Problem(
    "p1", "2 + 2?", "4", {"level": 3, "source": "book", "data_source": "book", "extra_info": {"split": "train"}}
)
CHAT = Problem("p2", [{"role": "user", "content": "2 + 2?"}], "4", BOOK.metadata)


def test_functions_of_verl_are_called_by_the_names_of_their_parameters():
    score = scorer("my_rewards:compute_score")
    score.check([BOOK])
    assert score(BOOK, ["4", "book"]) == [Reward(1.0, {"acc": True}), Reward(0.0, {"acc": False})]
    assert score(Problem("p", "?", 4, BOOK.metadata), ["4"])[0].value == 1.0
    assert scorer("my_rewards:brief_score")(PROBLEM, ["4", "5"]) == [Reward(1.0), Reward(0.0)]
    with pytest.raises(ValueError, match=r"'my_rewards:compute_score': .* 'data_source'"):
        score.check([PROBLEM])


@pytest.mark.parametrize("problem", [BOOK, CHAT])
@pytest.mark.parametrize("scope", ["sample", "group"])
def test_functions_of_trl_are_called_by_the_names_of_their_parameters(problem, scope):
    score = scorer("my_rewards:accuracy", reward_scope=scope)
    score.check([problem])
    assert score.reads_token_ids
    assert score(problem, ["4", "5", "?"], [1, 2, 1], [[7], [7, 8], [9]]) == [Reward(2.0), Reward(2.0), Reward(0.0)]


def test_the_answer_has_its_columns_name_for_functions_of_trl():
    score = scorer("my_rewards:graded", answer_column="solution")
    score.check([PROBLEM])
    assert not score.reads_token_ids
    assert score(PROBLEM, ["4", "5"]) == [Reward(1.0), Reward(0.0)]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("of_column", "its parameter 'source' would get the response"),
        ("answer_first", "its parameter 'answer' would get the response"),
        ("response_second", "its parameter 'response' would get the answer"),
        ("level_second", "its parameter 'level' would get the answer"),
        ("misspelt", "'sorce'; problem 'p1' offers .*did you mean 'source'"),
    ],
)
def test_ambiguous_parameters_are_refused_before_training(name, message):
    with pytest.raises(ValueError, match=f"^reward = 'my_rewards:{name}': .*{message}"):
        scorer(f"my_rewards:{name}").check([PROBLEM])


@pytest.mark.parametrize(
    "path", ["april.tasks.format:boxed", "april.tasks.length:per_thousand", "april.tasks.length:relative"]
)
def test_ready_made_functions_pass_the_check(path):
    scorer(path).check([PROBLEM, BOOK, CHAT])


def test_a_group_reward_that_is_a_dict_is_refused():
    with pytest.raises(RewardError, match=r"problem 'p1'.*by_response.*returned \{'4': 1.0\}"):
        scorer("my_rewards:by_response", reward_scope="group")(PROBLEM, ["4"])


def test_an_error_of_april_is_named_once():
    with pytest.raises(RewardError) as caught:
        scorer("my_rewards:nothing")(PROBLEM, ["4"])
    assert described(caught.value).startswith("problem 'p1', reward 'my_rewards:nothing'")
