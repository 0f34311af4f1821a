"""Names of SGLang's parsers of tool calls (sglang 0.5.23, srt/function_call/function_call_parser.py `ToolCallParserEnum`).

Left out are "hermes", which asyncmoe parses itself, and the parsers that /parse_function_call of an engine without tokenizer cannot use:
"deepseekv4" and "deepseekv41" need their model's tokenizer, "response_template" its template; "beam", "glm47" and "iquest_q1" fail with an
internal error.
"""

from __future__ import annotations

_PARSERS = """
apertus2509 cohere_command4 deepseekv3 deepseekv31 deepseekv32 dots gemma4 gigachat3 gigachat35 glm glm45 gpt-oss hunyuan inkling
interns1 k2_horizon kimi_k2 kimi_k3 lfm2 ling3 llama3 mimo minicpm5 minimax-m2 minimax-m3 mistral muse nanbeige poolside_v1 pythonic
qwen qwen25 qwen3_coder spark25 step3 step3p5 trinity
"""
SGLANG_PARSERS = tuple(_PARSERS.split())
