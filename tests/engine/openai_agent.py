"""An agent written for OpenAI's API that knows nothing of asyncmoe."""

from __future__ import annotations


def two_questions(base_url: str, api_key: str, prompt: str, answer: str) -> float:
    """Asks, and asks again in the same conversation; the reward is a function of what came back, so that a test can check it."""
    import openai

    with openai.OpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
        messages: list[dict[str, str]] = [{"role": "user", "content": prompt}]
        first = client.chat.completions.create(model="any", messages=messages, max_tokens=12)  # type: ignore[arg-type]
        said = first.choices[0].message.content or ""
        messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "and again?"}]
        second = client.chat.completions.create(model="any", messages=messages, max_tokens=9)  # type: ignore[arg-type]
    assert first.usage is not None
    assert second.usage is not None
    return float(first.usage.completion_tokens * 100 + second.usage.completion_tokens)
