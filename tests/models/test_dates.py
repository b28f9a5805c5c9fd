"""The date that chat templates write: of the run, in its state, the same on all ranks; the text is transformers'."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import date, datetime
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

import torch
from families import chat, encoder_of, tokenizer_of
from forked import on_gloo
from made import made_once
from transformers.utils import chat_template_utils

from energon_bridge import WorkerConfig, get_savable_loader, get_train_dataset
from energon_bridge.core.encoder.task_encoder import AugmentTaskEncoder
from energon_bridge.core.errors import ConfigurationError, SettingMismatchError, StateFormatError
from energon_bridge.core.loader.saved_run import read, write
from energon_bridge.core.samples import CaptioningSample
from energon_bridge.models.conversations import templates
from energon_bridge.models.conversations.layout import ConversationTemplateConfig, MultiModalSampleConfig
from energon_bridge.models.conversations.multimodal import MultiModalTaskEncoder
from energon_bridge.models.conversations.templates import ChatTemplate, RunDay
from energon_bridge.models.families import ChatConfig
from energon_bridge.tools.testing import create_captioning_test_dataset
from energon_bridge.training.config_file import dump_config, load_config

FIRST, NEXT = date(2026, 1, 31), date(2026, 2, 1)
TURNS = (
    "{%- for message in messages %}{{ '[' + message.role + ']' }}"
    "{%- if message.role == 'assistant' %}{% generation %}{{ message.content }}</s>{% endgeneration %}"
    "{%- else %}{{ message.content }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '[assistant]' }}{%- endif %}"
)
# As the models have it, without the rest of their system prompts.
DATES = {
    "Llama 3.2, MLlama": (
        "\n{%- if not date_string is defined %}\n    {%- if strftime_now is defined %}\n"
        '        {%- set date_string = strftime_now("%d %b %Y") %}\n    {%- else %}\n'
        '        {%- set date_string = "26 Jul 2024" %}\n    {%- endif %}\n{%- endif %}\n'
        '{{- "Cutting Knowledge Date: December 2023\\n" }}\n{{- "Today Date: " + date_string + "\\n\\n" }}\n'
    ),
    "gpt-oss": (
        "{#-\n  a comment #}\n{%- macro build_system_message() -%}\n"
        '    {{- "Current date: " + strftime_now("%Y-%m-%d") + "\\n\\n" }}\n{%- endmacro -%}\n'
        "{{- build_system_message() }}\n"
    ),
    "Mistral Small 3.1": (
        '{%- set today = strftime_now("%Y-%m-%d") %}\n'
        '{%- set default_system_message = "The current date is " + today + "." %}\n{{ default_system_message }}'
    ),
    "Granite 3": "{{ \"Today's Date: \" + strftime_now('%B %d, %Y') + '.\\n' }}",
    "odd": (
        "   {% if true %}\n  {{ strftime_now(format='%A %-d.%-m.%y, 100%% of %j %d%%d') }} "
        "{{ (strftime_now('%d') | int) + 1 }}{{ strftime_now('%' ~ 'H' ~ ':%M') }}{% endif %}\n"
    ),
}
data = made_once(create_captioning_test_dataset, num_train=16, num_val=4)


def clock(monkeypatch: pytest.MonkeyPatch, day: date) -> None:
    """Let it be a day, for our clock and for that of transformers."""

    class Day(date):
        @classmethod
        def today(cls) -> date:  # type: ignore[override]
            return day

    class Now(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> datetime:  # type: ignore[override]
            return datetime(day.year, day.month, day.day)

    monkeypatch.setattr(templates, "date", Day)
    monkeypatch.setattr(chat_template_utils, "datetime", Now)


def as_chat(sample: CaptioningSample, config: Any) -> Any:
    return chat("color?", sample.caption, key=sample.__key__)


def encoder(today: str | None = None, of: str = "Llama 3.2, MLlama", marked: bool = True) -> Any:
    turns = TURNS if marked else TURNS.replace("{% generation %}", "").replace("{% endgeneration %}", "")
    made = encoder_of("llava", ChatConfig(chat_template=DATES[of] + turns, today=today))
    made.register_encoder(CaptioningSample, as_chat)
    return made


def plain(today: str | None = None) -> Any:
    template = ConversationTemplateConfig(chat_template=DATES["gpt-oss"] + TURNS)
    config = MultiModalSampleConfig(conversation_template_config=template)
    made = MultiModalTaskEncoder(tokenizer_of("llava"), None, config, today=today)
    made.register_encoder(CaptioningSample, as_chat)
    return made


ENCODERS: dict[str, Callable[..., Any]] = {
    "chat": encoder,
    "not marked": lambda today=None: encoder(today, marked=False),
    "plain": plain,
    "wrapped": lambda today=None: AugmentTaskEncoder(encoder(today)),
}


@pytest.fixture(params=ENCODERS)
def make(request: pytest.FixtureRequest) -> Callable[..., Any]:
    return ENCODERS[request.param]


def loader_of(data: Path, encoder: Any, workers: int = 0, **config: Any) -> Any:
    worker_config = WorkerConfig(num_workers=workers, num_lanes=2, **config)
    return get_savable_loader(get_train_dataset(data, batch_size=2, task_encoder=encoder, worker_config=worker_config))


def tokens(loader: Any, count: int) -> list[list[int]]:
    found = [batch.tokens.flatten().tolist() for _, batch in zip(range(count), loader, strict=False)]
    loader.close()
    return found


# What is written -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("marked", [True, False])
@pytest.mark.parametrize("name", DATES)
def test_the_text_is_that_of_transformers_on_the_day(name: str, marked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    source = DATES[name] + (
        TURNS if marked else TURNS.replace("generation %}", "if true %}").replace("endif true", "endif")
    )
    messages = [{"role": "user", "content": "100%d {{ a }}"}, {"role": "assistant", "content": "%Y"}]
    tokenizer = tokenizer_of("llava")
    for day in (FIRST, NEXT):
        clock(monkeypatch, day)
        expected = tokenizer.apply_chat_template(messages, chat_template=source, tokenize=False)
        clock(monkeypatch, date(1999, 12, 31))
        template = ChatTemplate(tokenizer=tokenizer, source=source, day=RunDay.of(day))
        text, spans = template.answers(messages, None, [1])
        assert template.text(messages) == text == expected
        assert [text[span.start : span.end] for span in spans] == ["%Y</s>"]


def test_an_error_of_a_template_names_its_own_line() -> None:
    source = "{{ strftime_now('%d') }}\n{{ nothing | unknown_filter }}"
    template = ChatTemplate(tokenizer=tokenizer_of("llava"), source=source)
    with pytest.raises(ConfigurationError, match="error in line 2"):
        template.text([{"role": "user", "content": "a"}])


@pytest.mark.parametrize("today", ["31 January", "2026-02-30", 7])
def test_a_day_that_is_none_is_refused(today: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"today must be a date such as '2026-01-31', got"):
        ChatConfig(today=today)


# Runs and their states -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 1])
def test_a_run_resumed_on_another_day_goes_on_with_the_same_tokens(
    make: Callable[..., Any], workers: int, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock(monkeypatch, FIRST)
    whole = tokens(loader_of(data, make()), 6)
    loader = loader_of(data, make(), workers)
    assert tokens(loader, 2) == whole[:2]
    state = loader.save_state_rank()
    assert read(state).settings["today"] == "2026-01-31"
    clock(monkeypatch, NEXT)
    assert tokens(loader, 2) == whole[2:4]  # the run goes on past midnight
    assert tokens(loader_of(data, make()), 6) != whole
    resumed = loader_of(data, make(), workers)
    resumed.restore_state_rank(state)
    assert tokens(resumed, 4) == whole[2:]
    assert read(resumed.save_state_rank()).settings["today"] == "2026-01-31"


def test_a_day_that_is_set_is_the_days_of_the_run(
    make: Callable[..., Any], data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock(monkeypatch, FIRST)
    loader = loader_of(data, make())
    whole = tokens(loader, 4)
    clock(monkeypatch, NEXT)
    assert tokens(loader_of(data, make("2026-01-31")), 4) == whole
    state = loader.save_state_rank()
    loader_of(data, make("2026-01-31")).restore_state_rank(state)
    with pytest.raises(SettingMismatchError, match=r"saved with today='2026-01-31', this run has today='2026-02-01'"):
        loader_of(data, make("2026-02-01")).restore_state_rank(state)


def test_states_without_a_day_or_with_a_damaged_one(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock(monkeypatch, FIRST)
    state = loader_of(data, encoder()).save_state_rank()
    saved = read(state)
    del saved.settings["today"]
    for today in (None, "2026-02-01"):  # of an earlier version
        loader_of(data, encoder(today)).restore_state_rank(write(saved))
    saved.settings["today"] = "yesterday"
    with pytest.raises(StateFormatError, match="today='yesterday' is no date"):
        loader_of(data, encoder()).restore_state_rank(write(saved))
    without = encoder_of("llava", ChatConfig(chat_template=TURNS))
    assert "today" not in read(loader_of(data, without).save_state_rank()).settings


@pytest.fixture
def calm() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def test_ranks_that_start_around_midnight_have_one_day(data: Path, monkeypatch: pytest.MonkeyPatch, calm: None) -> None:
    def load(rank: int) -> Any:
        clock(monkeypatch, NEXT if rank else FIRST)
        loader = loader_of(data, encoder(), rank=rank, world_size=2)
        found = tokens(loader, 2)
        state = loader.state_dict()
        return read(state).settings["today"], found

    days, found = zip(*on_gloo(2, load), strict=True)
    assert days[0] == days[1] in ("2026-01-31", "2026-02-01")
    clock(monkeypatch, date.fromisoformat(days[0]))
    alone = tokens(loader_of(data, encoder()), 4)
    assert [*found[0], *found[1]] == [alone[0], alone[2], alone[1], alone[3]]


def test_a_rank_that_opens_no_loader_is_not_waited_for(data: Path, monkeypatch: pytest.MonkeyPatch, calm: None) -> None:
    def load(rank: int) -> Any:
        clock(monkeypatch, FIRST)
        if rank == 0:  # the other has left before this one asks, and has asked nothing
            return None
        loader = loader_of(data, encoder(), rank=0, world_size=1)
        return read(loader.save_state_rank()).settings["today"], tokens(loader, 1)

    nothing, (day, _) = on_gloo(2, load)
    assert (nothing, day) == (None, "2026-01-31")


def test_a_file_of_the_training_script_sets_the_day(tmp_path: Path) -> None:
    for written in ("2026-01-31", "'2026-01-31'"):
        (tmp_path / "config.yaml").write_text(f"data:\n  today: {written}\n")
        config = load_config(tmp_path / "config.yaml")
        assert config.data.today == "2026-01-31"
        (tmp_path / "config.yaml").write_text(dump_config(config))
        assert load_config(tmp_path / "config.yaml") == config
    assert load_config(None, ["data.today=2026-01-31"]).data.today == "2026-01-31"
