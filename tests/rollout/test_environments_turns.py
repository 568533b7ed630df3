"""The tokens between turns: what a chat template puts there, and templates that are refused."""

from __future__ import annotations

import copy

import pytest

from ledger.errors import InvalidArgument
from rollout.environments.driving import EnvironmentEpisode, EpisodeLimits
from rollout.environments.protocol import Message, StepResult
from rollout.environments.turns import ChatTurns, PlainTurns
from rollout.models.tokenizer import EOS_TOKEN_ID
from tests.rollout.agents import driven, repeating

PLAIN = (
    "{% for m in messages %}<reserved_0>{{ m.role }}\n{{ m.content }}<eos>\n{% endfor %}"
    "{% if add_generation_prompt %}<reserved_0>assistant\n{% endif %}"
)
TOOLS_TOGETHER = (
    "{% for m in messages %}"
    "{% if m.role == 'tool' %}"
    "{% if messages[loop.index0 - 1].role != 'tool' %}<reserved_0>user\n{% endif %}"
    "tool:{{ m.content }}\n"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}<eos>\n{% endif %}"
    "{% else %}<reserved_0>{{ m.role }}\n{{ m.content }}<eos>\n{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<reserved_0>assistant\n{% endif %}"
)
FORGETS_REASONING = PLAIN.replace(
    "{{ m.content }}", "{{ m.content.split('</think>')[-1].lstrip('\n') }}"
)
NO_THOUGHTS = PLAIN.replace("assistant\n{% endif %}", "assistant\n<think></think>{% endif %}")
COUNTS = PLAIN.replace("<reserved_0>{{ m.role }}", "<reserved_0>{{ loop.index }}{{ m.role }}")
SHOUTS = PLAIN.replace("{{ m.content }}", "{{ m.content | upper }}")
REFUSES = "{{ raise_exception('roles must alternate') }}"
OPEN_END = PLAIN.replace("<eos>\n", "\n")


@pytest.fixture
def chat(tokenizer):
    def with_template(template):
        own = copy.deepcopy(tokenizer)
        own.chat_template = template
        return own

    return with_template


def turns(tokenizer, *roles, **options):
    return ChatTurns(tokenizer, roles=roles or ("user",), stop_token_ids=[EOS_TOKEN_ID], **options)


def rendered(tokenizer, messages):
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return tokenizer.encode(text, add_special_tokens=False)


def user(text):
    return {"role": "user", "content": text}


def assistant(text):
    return {"role": "assistant", "content": text}


def test_an_increment_is_what_the_template_puts_between_two_turns(chat):
    own = chat(PLAIN)
    found = turns(own).increment([Message(text="no, again")], EOS_TOKEN_ID)
    assert own.decode(found) == "\n<reserved_0>user\nno, again<eos>\n<reserved_0>assistant\n"
    # A turn that was cut has no end of its own.
    cut = turns(own).increment([Message(text="no, again")], None)
    assert cut.tolist() == [EOS_TOKEN_ID, *found.tolist()]


@pytest.mark.parametrize("template", [PLAIN, TOOLS_TOGETHER])
def test_a_whole_episode_is_what_the_template_makes_of_the_conversation(chat, template):
    """Prompt, sampled ids and increments, one behind the other, against one rendering of all."""
    own = chat(template)
    answers = {"a": ["one", "two"], "b": ["three"]}

    class Answers:
        name, version = "answers", "1"

        def reset(self, task):
            return None

        def step(self, action):
            told = [
                Message(text=text, role="tool", source="tool")
                for text in answers.get(action.text, ())
            ]
            return StepResult(messages=told, done=not told)

        def close(self):
            pass

    function = EnvironmentEpisode("test", Answers, turns(own, "tool"), EpisodeLimits())
    prompt = own.apply_chat_template([user("hi")], tokenize=False, add_generation_prompt=True)
    conversation = [user("hi")]
    for said in ("a", "b"):
        conversation.append(assistant(said))
        conversation += [{"role": "tool", "content": text} for text in answers[said]]
    whole = [*rendered(own, conversation), *own.encode("c<eos>", add_special_tokens=False)]
    begin = len(own.encode(prompt, add_special_tokens=False))
    engine = repeating(whole[begin:], begin, len(own))
    episode, _ = driven(own, function, engine, prompt=prompt)
    assert len(engine.requests) == 3
    assert episode.trajectory.context().tolist() == whole


def test_ids_that_were_sampled_are_never_encoded_again(chat):
    """The stop token that was sampled stays, though it is not the template's."""
    own = chat(PLAIN)
    found = turns(own).increment([Message(text="x")], 7)
    assert own.decode(found).startswith("\n<reserved_0>user")


@pytest.mark.parametrize(("template", "options", "match"), [
    (FORGETS_REASONING, {}, "the reasoning of an earlier turn"),
    (NO_THOUGHTS, {}, "the words of an earlier turn"),
    (COUNTS, {}, "another one in a longer conversation"),
    (SHOUTS, {}, "words of an assistant once, as they are"),
    (REFUSES, {}, "roles must alternate"),
    (OPEN_END, {}, "turns that end with a stop token"),
    (None, {}, "a tokenizer with a chat template"),
])  # fmt: skip
def test_templates_that_cannot_work_are_refused_when_a_run_begins(chat, template, options, match):
    with pytest.raises(InvalidArgument, match=match):
        turns(chat(template), **options)


@pytest.mark.parametrize("template", [FORGETS_REASONING, NO_THOUGHTS])
def test_history_that_is_kept_is_accepted_where_it_is_asked_for(chat, template):
    found = turns(chat(template), keep_history=True).increment([Message(text="x")], EOS_TOKEN_ID)
    assert chat(template).decode(found).startswith("\n<reserved_0>user\nx<eos>\n")


def test_behind_a_prompt_of_a_template_nothing_is_added(chat):
    with pytest.raises(InvalidArgument, match="put it into the prompt"):
        turns(chat(PLAIN)).opening([Message(text="go")])


def test_without_a_template_messages_are_as_they_are(tokenizer):
    found = PlainTurns(tokenizer).increment([Message(text="a"), Message(text="b")], EOS_TOKEN_ID)
    assert tokenizer.decode(found) == "ab"
