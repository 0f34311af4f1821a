"""An agent written for OpenAI's API that knows nothing of asyncmoe."""

from __future__ import annotations


def two_questions(base_url: str, api_key: str, prompt: str, answer: str) -> float:
    """Asks twice in one conversation; the reward is a function of the responses, so that a test can check it."""
    import openai

    with openai.OpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
        messages: list[dict[str, str]] = [{"role": "user", "content": prompt}]
        first = client.chat.completions.create(model="policy", messages=messages, max_tokens=12)  # type: ignore[arg-type]
        said = first.choices[0].message.content or ""
        messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "and again?"}]
        second = client.chat.completions.create(model="policy", messages=messages, max_tokens=9)  # type: ignore[arg-type]
    return float(first.usage.completion_tokens * 100 + second.usage.completion_tokens)


LETTERS = "abcdefghijklmnopqrstuvwxyz"


def streamed_and_stopped(base_url: str, api_key: str, prompt: str, answer: str) -> float:
    """Streams the first response, ends it at one of some letters, and continues; the reward also counts its pieces."""
    import openai

    with openai.OpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
        messages: list[dict[str, str]] = [{"role": "user", "content": prompt}]
        stops, options = list(LETTERS), {"include_usage": True}
        asked = {"model": "policy", "messages": messages, "max_tokens": 12, "temperature": 0.0}
        parts = list(client.chat.completions.create(**asked, stream=True, stop=stops, stream_options=options))  # type: ignore[call-overload]
        said = "".join(part.choices[0].delta.content or "" for part in parts if part.choices)
        assert not set(said) & set(LETTERS)
        messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "and again?"}]
        second = client.chat.completions.create(model="policy", messages=messages, max_tokens=9)  # type: ignore[arg-type]
    return float(parts[-1].usage.completion_tokens * 100 + second.usage.completion_tokens)


def goes_back(base_url: str, api_key: str, prompt: str, answer: str) -> dict[str, float]:
    """Answers the first response in two ways, then with its first character dropped; rewards one of the paths by its name."""
    import openai

    with openai.OpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
        messages: list[dict[str, str]] = [{"role": "user", "content": prompt}]
        first = client.chat.completions.create(model="policy", messages=messages, max_tokens=12)  # type: ignore[arg-type]
        said = first.choices[0].message.content or ""
        paths = []
        for content, question in ((said, "and again?"), (said, "or else?"), (said[1:], "and again?")):
            asked = [*messages, {"role": "assistant", "content": content}, {"role": "user", "content": question}]
            answered = client.chat.completions.with_raw_response.create(model="policy", messages=asked, max_tokens=9)  # type: ignore[arg-type]
            paths.append(answered.headers["asyncmoe-path"])
    assert paths == ["policy", "policy/2", "policy/3"]
    return {"policy": 1.0, "policy/2": 0.0}
