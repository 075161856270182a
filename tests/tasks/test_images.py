"""Images of records: every form that data sets have, and what is no image."""

from __future__ import annotations

import hashlib
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from PIL import ExifTags, Image
from transformers.image_utils import load_image

from april.images import store as store_module
from april.images.source import ImageError, open_image, read_image
from april.images.store import ImageStore, NoImages
from april.images.support import load_images
from april.rollout.trajectory.prompt import Prompt
from april.tasks.encoding import Encoder
from april.tasks.images import image_sources, with_images
from april.tasks.records import Records, read_records
from april.tasks.task import Problem, TaskSpec
from tests import tiny, vision
from tests.limits import HANG

ASK = {"type": "text", "text": "Which colour?"}


def records(path: Path | str, **settings: Any) -> Records:
    spec = TaskSpec(kind="records", path=str(path), **{"answer_column": None, "reward": "len", **settings})
    return read_records(str(path), spec)


def lines(path: Path, *rows: Any) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def encoder(directory: Path) -> Encoder:
    images = load_images(str(vision.save(directory / "policy")))
    return Encoder(vision.tokenizer(), images=images)


@pytest.fixture
def red(tmp_path: Path) -> Path:
    return Path(vision.picture(tmp_path / "pictures" / "red.png"))


def test_messages_of_json_lines_name_images_relative_to_their_file(tmp_path: Path, red: Path) -> None:
    forms = [
        {"type": "image", "image": "pictures/red.png"},
        {"type": "image", "path": "pictures/red.png"},
        {"type": "image_url", "image_url": {"url": "pictures/red.png"}},
        {"type": "image", "url": f"file://{red}"},
    ]
    rows = [{"prompt": [{"role": "user", "content": [form, ASK]}], "label": i} for i, form in enumerate(forms)]
    found = records(lines(tmp_path / "a.jsonl", *rows))
    for problem in found.problems:
        assert image_sources(problem.prompt) == [str(red)]
        assert problem.question == "Which colour?"
        prompt = encoder(tmp_path)(problem)
        [feature] = prompt.features
        assert feature.digest == hashlib.sha256(red.read_bytes()).hexdigest()
        assert set(prompt.token_ids[feature.offset : feature.end]) == {vision.PLACEHOLDER}
        assert Prompt.from_dict(json.loads(json.dumps(prompt.to_dict()))) == prompt


def test_a_column_of_images_fills_the_places_of_the_prompt(tmp_path: Path, red: Path) -> None:
    blue = vision.picture(tmp_path / "pictures" / "blue.png", colour="blue")
    two = ["pictures/red.png", "pictures/blue.png"]
    prompts = [
        "Is <image> like <image>?",
        "Are they alike?",
        [{"role": "user", "content": [{"type": "image"}, ASK, {"type": "image"}]}],
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "<image>, then <image>"}],
    ]
    path = lines(tmp_path / "a.jsonl", *({"prompt": prompt, "images": two} for prompt in prompts))
    found = records(path, image_column="images")
    for problem in found.problems:
        assert image_sources(problem.prompt) == [str(red), blue]
        assert "images" not in problem.metadata
        assert len(encoder(tmp_path)(problem).features) == 2
    parts = found.problems[0].prompt[0]["content"]
    assert [part.get("text") for part in parts] == ["Is ", None, " like ", None, "?"]
    assert [part["type"] for part in found.problems[1].prompt[0]["content"]] == ["image", "image", "text"]


def test_tables_store_images_and_mix_records_with_and_without(tmp_path: Path, red: Path) -> None:
    import pyarrow
    from pyarrow import parquet

    stored = {"bytes": red.read_bytes(), "path": "red.png"}
    messages = [{"role": "user", "content": [{"type": "image", "image": stored, "text": None}, {**ASK, "image": None}]}]
    rows = {
        "prompt": ["<image>?", "Nothing.", "<image><image>"],
        "images": [[stored], [], [stored, stored]],
        "messages": [messages, [{"role": "user", "content": [{**ASK, "image": None}]}], messages],
    }
    path = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.table(rows), path, row_group_size=2)
    columns = records(path, image_column="images", metadata_columns=())
    assert [len(image_sources(problem.prompt)) for problem in columns.problems] == [1, 0, 2]
    inside = records(path, prompt_column="messages", metadata_columns=())
    assert inside.problems[1].prompt == [{"role": "user", "content": "Which colour?"}]
    for problem in (columns.problems[2], inside.problems[2]):
        sources = image_sources(problem.prompt)
        assert sources[0].startswith(f"{path}#3/")
        assert all(read_image(source) == red.read_bytes() for source in sources)


def test_data_sets_of_the_hub_store_images(tmp_path: Path, red: Path) -> None:
    datasets = pytest.importorskip("datasets")

    own = datasets.Dataset.from_dict(
        {"prompt": ["What?", "And?"], "image": [str(red)] * 2, "images": [[str(red)], []]},
        features=datasets.Features(
            {
                "prompt": datasets.Value("string"),
                "image": datasets.Image(),
                "images": datasets.List(datasets.Image()),
            }
        ),
    )
    (tmp_path / "data").mkdir()
    own.to_parquet(tmp_path / "data" / "train-00000-of-00001.parquet")
    found = records(tmp_path / "data", image_column="image", metadata_columns=())
    several = records(tmp_path / "data", image_column="images", metadata_columns=())
    assert [len(image_sources(problem.prompt)) for problem in several.problems] == [1, 0]
    for problem in found.problems:
        [source] = image_sources(problem.prompt)
        assert read_image(source) == red.read_bytes()
        assert encoder(tmp_path)(problem).features


@pytest.mark.parametrize(
    ("row", "settings", "message"),
    [
        ({"prompt": "<image>?", "images": []}, {"image_column": "images"}, "in its prompt: 1; images in its column: 0"),
        (
            {"prompt": "<image>", "images": ["a", "b"]},
            {"image_column": "images"},
            "in its prompt: 1; images in its column: 2",
        ),
        ({"prompt": "What?"}, {"image_column": "images"}, "image_column = 'images': no such column"),
        ({"prompt": "What?", "image": 3}, {"image_column": "image"}, "column 'image' is of type int: give the path"),
        ({"prompt": "What?", "image": "http://x/y.png"}, {"image_column": "image"}, "begins with http: save it"),
        ({"prompt": "What?", "image": "data:image/png;base64,A"}, {"image_column": "image"}, "begins with data"),
        ({"prompt": [{"role": "user", "content": [{"type": "image"}]}]}, {}, "1 parts .* name their column"),
        ({"prompt": [{"role": "user", "content": [{"type": "video", "video": "a"}]}]}, {}, "part of type 'video'"),
        ({"prompt": [{"role": "user", "content": ["a"]}]}, {}, "part of type None"),
        ({"prompt": [{"role": "user", "content": 3}]}, {}, "must be text, or messages with role and content"),
    ],
)
def test_records_whose_images_cannot_be_placed_are_named(row: Any, settings: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=rf"a\.jsonl:1: .*{message}"):
        records(lines(tmp_path / "a.jsonl", row), **settings)


def test_images_that_cannot_be_read_are_named(tmp_path: Path, red: Path) -> None:
    (tmp_path / "text.png").write_text("no image")
    (tmp_path / "cut.png").write_bytes(red.read_bytes()[:60])
    thin = vision.picture(tmp_path / "thin.png", (1000, 2))
    make = encoder(tmp_path)
    for name, message in (
        ("missing.png", "cannot be read: No such file"),
        ("text.png", "cannot be decoded: cannot identify"),
        ("cut.png", "cannot be decoded"),
        (thin, "aspect ratio"),
    ):
        [problem] = records(
            lines(tmp_path / "a.jsonl", {"prompt": "What?", "image": name}), image_column="image"
        ).problems
        with pytest.raises(ValueError, match=message) as raised:
            make(problem)
        assert Path(name).name in str(raised.value)
        assert "\n" not in str(raised.value)


def test_photographs_are_turned_upright_as_transformers_does(tmp_path: Path) -> None:
    photo, exif = Image.open(vision.picture(tmp_path / "1.png", (32, 16), mark=4)), Image.Exif()
    exif[ExifTags.Base.Orientation] = 6
    photo.save(tmp_path / "turned.jpg", exif=exif)
    upright = open_image((tmp_path / "turned.jpg").read_bytes(), "turned.jpg")
    assert upright.size == (16, 32)
    assert upright.tobytes() == load_image(str(tmp_path / "turned.jpg")).tobytes()


def test_text_with_a_placeholder_of_its_own_is_refused(tmp_path: Path, red: Path) -> None:
    row = {"prompt": "What is <|image_pad|>?", "image": str(red)}
    [problem] = records(lines(tmp_path / "a.jsonl", row), image_column="image").problems
    with pytest.raises(ValueError, match="2 placeholders for 1 image"):
        encoder(tmp_path)(problem)


def test_placeholders_without_a_token_between_them_are_refused(tmp_path: Path, red: Path) -> None:
    images = vision.image_store()
    with pytest.raises(ImageError, match="must write a token between two images"):
        images.expand([50, vision.PLACEHOLDER, vision.PLACEHOLDER, 51], [str(red), str(red)])


def test_a_missing_or_changed_image_is_one_line(tmp_path: Path, red: Path) -> None:
    [problem] = records(lines(tmp_path / "a.jsonl", {"prompt": "?", "image": str(red)}), image_column="image").problems
    [feature] = encoder(tmp_path)(problem).features
    vision.picture(red, colour="green")
    with pytest.raises(ImageError, match=r"red\.png: has changed since its prompt was encoded"):
        vision.image_store().pixels(feature)
    red.unlink()
    with pytest.raises(ImageError, match=r"red\.png: cannot be read: No such file"):
        vision.image_store().pixels(feature)


def test_pixels_are_kept_up_to_a_number_of_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make = encoder(tmp_path)
    assert isinstance(make.images, ImageStore)
    features = []
    for number in range(6):
        vision.picture(tmp_path / f"{number}.png", mark=number)
        row = {"prompt": "?", "image": f"{number}.png"}
        [problem] = records(lines(tmp_path / "a.jsonl", row), image_column="image").problems
        features += make(problem).features
    one = make.images.pixels(features[0]).patches.nbytes
    monkeypatch.setattr("april.images.store.CACHED_BYTES", 3 * one)
    for feature in features:
        assert make.images.pixels(feature) is make.images.pixels(feature)
    for number in range(6):
        (tmp_path / f"{number}.png").unlink()
    for feature in features[-3:]:
        make.images.pixels(feature)
    with pytest.raises(ImageError, match="cannot be read"):
        make.images.pixels(features[0])


def test_models_without_images_say_so(tmp_path: Path, red: Path) -> None:
    [problem] = records(lines(tmp_path / "a.jsonl", {"prompt": "?", "image": str(red)}), image_column="image").problems
    text = load_images(str(tiny.save(tmp_path / "text")))
    assert isinstance(text, NoImages)
    with pytest.raises(ValueError, match=r"it has 1 image, but the policy reads none .*qwen3"):
        Encoder(tiny.tokenizer(), images=text)(problem)
    vision.save(tmp_path / "policy")
    (tmp_path / "policy" / "preprocessor_config.json").unlink()
    blind = load_images(str(tmp_path / "policy"))
    assert isinstance(blind, NoImages)
    assert "no image processor (preprocessor_config.json)" in blind.reason
    # Text is encoded by a model without an image processor too.
    [plain] = records(lines(tmp_path / "b.jsonl", {"prompt": "What?"})).problems
    assert Encoder(vision.tokenizer(), "always", images=blind)(plain).features == ()


def test_a_prompt_without_places_and_images_is_unchanged() -> None:
    assert with_images("plain", []) == "plain"


def test_threads_read_a_part_of_a_parquet_file_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import pyarrow
    from pyarrow import parquet

    path, read, second = tmp_path / "a.parquet", parquet.ParquetFile.read_row_group, threading.Barrier(2)
    parquet.write_table(pyarrow.table({"image": [b"one", b"two"]}), path)
    reads = []

    def slow(file: Any, *arguments: Any, **settings: Any) -> Any:
        reads.append(arguments)
        with suppress(threading.BrokenBarrierError):
            second.wait(0.2)  # the other thread comes here too if it may
        return read(file, *arguments, **settings)

    monkeypatch.setattr(parquet.ParquetFile, "read_row_group", slow)
    with ThreadPoolExecutor(2) as threads:
        found = list(threads.map(read_image, (f"{path}#{row}/image" for row in (1, 2))))
    assert found == [b"one", b"two"]
    assert len(reads) == 1


def test_images_of_several_problems_are_read_in_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sources = [vision.picture(tmp_path / f"{number}.png", mark=number) for number in range(2)]
    together = threading.Barrier(2, timeout=HANG)

    def read(source: str) -> bytes:
        together.wait()
        return read_image(source)

    monkeypatch.setattr(store_module, "read_image", read)
    content: list[list[dict[str, str]]] = [[{"type": "image", "image": source}] for source in sources]
    problems = [Problem("", [{"role": "user", "content": parts}], "x") for parts in content]
    prompts = list(Encoder(vision.tokenizer(), images=vision.image_store()).batch(problems))
    assert [prompt.features[0].source for prompt in prompts if isinstance(prompt, Prompt)] == sources


def test_hashes_and_sizes_of_few_images_are_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "KNOWN", 2)
    store = vision.image_store()
    sources = [vision.picture(tmp_path / f"{number}.png", (16 + 8 * number, 16)) for number in range(3)]
    features = [store.expand([vision.PLACEHOLDER], [source])[1][0] for source in sources]
    grids = [store.grid(feature) for feature in features]
    assert [store.knows_grid(feature) for feature in features] == [False, True, True]
    assert [store.grid(feature) for feature in features] == grids
    (tmp_path / "0.png").write_bytes(Path(sources[1]).read_bytes())
    assert store.measure(sources[0]) == store.measure(sources[1])
