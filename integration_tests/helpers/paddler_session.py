"""What a user of the published client does, run with that client's own environment.

Arguments: the address of the balancer; on standard input: messages by name, to be parsed. Prints one
JSON object with what the client has seen.
"""

import asyncio
import json
import sys
from collections.abc import Callable
from typing import Any

from paddler_client.agent_desired_model import AgentDesiredModel
from paddler_client.balancer_desired_state import BalancerDesiredState
from paddler_client.chat_template import ChatTemplate
from paddler_client.client_inference import ClientInference
from paddler_client.client_management import ClientManagement
from paddler_client.continue_from_conversation_history_params import (
    ContinueFromConversationHistoryParams,
)
from paddler_client.continue_from_raw_prompt_params import ContinueFromRawPromptParams
from paddler_client.conversation_message import ConversationMessage
from paddler_client.embedding_input_document import EmbeddingInputDocument
from paddler_client.embedding_normalization_method import EmbeddingNormalizationMethod
from paddler_client.error import HttpError
from paddler_client.generate_embedding_batch_params import GenerateEmbeddingBatchParams
from paddler_client.grammar_constraint import GbnfGrammarConstraint
from paddler_client.inference_message import parse_inference_client_message
from paddler_client.inference_parameters import InferenceParameters
from paddler_client.tool import Function, Tool
from paddler_client.validated_parameters_schema import ValidatedParametersSchema


def told(messages: list[Any]) -> dict[str, Any]:
    summary = messages[-1].summary
    return {
        "kinds": [str(message.kind) for message in messages],
        "text": "".join(message.token or "" for message in messages),
        "generated_by": sorted({message.generated_by for message in messages}),
        "completion_tokens": summary.usage.completion_tokens if summary else None,
        "error": messages[-1].error_message,
    }


async def main(address: str) -> dict[str, Any]:
    chat = ContinueFromConversationHistoryParams(
        add_generation_prompt=True,
        conversation_history=[ConversationMessage(content="Say hello.", role="user")],
        enable_thinking=False,
        max_tokens=12,
    )
    raw = ContinueFromRawPromptParams(max_tokens=5, raw_prompt="The capital of France is")
    seen: dict[str, Any] = {}
    async with ClientInference(address) as inference, ClientManagement(address) as management:
        seen["health"] = [await inference.get_health(), await management.get_health()]
        seen["http_chat"] = told(
            [m async for m in inference.post_continue_from_conversation_history(chat)]
        )
        streams = [
            await inference.continue_from_conversation_history(chat),
            await inference.continue_from_raw_prompt(raw),
        ]
        seen["socket_chat"], seen["socket_raw"] = await asyncio.gather(
            *(collect(stream) for stream in streams)
        )
        too_long = ContinueFromRawPromptParams(max_tokens=5, raw_prompt="word " * 9000)
        seen["too_long"] = await collect(await inference.continue_from_raw_prompt(too_long))

        seen["agents"] = [a.model_dump() for a in (await management.get_agents()).agents]
        async for state in management.agents_stream():
            seen["agents_stream"] = [agent.name for agent in state.agents]
            break
        async for state in management.buffered_requests_stream():
            seen["buffered_stream"] = state.buffered_requests_current
            break
        seen["buffered"] = (await management.get_buffered_requests()).buffered_requests_current

        before = await management.get_balancer_desired_state()
        wanted = BalancerDesiredState(
            inference_parameters=InferenceParameters(temperature=0.25, top_k=7),
            model=AgentDesiredModel.local_to_agent("/models/other.gguf"),
            use_chat_template_override=False,
        )
        await management.put_balancer_desired_state(wanted)
        seen["desired_state_round_trip"] = await management.get_balancer_desired_state() == wanted
        await management.put_balancer_desired_state(before)
        seen["agent_of_another_model"] = await model_of_the_agent(management, before)
        seen |= await agent_details(management, before)
        seen |= await refusals(inference)
        seen |= await embeddings(inference, management, before)
        seen["metrics"] = await management.get_metrics()
    return seen


async def until(management: ClientManagement, condition: Callable[[Any], bool]) -> Any:
    """Follow the only agent until this is true of it."""
    async for state in management.agents_stream():
        if len(state.agents) == 1 and condition(state.agents[0]):
            return state.agents[0]
    raise AssertionError("the stream ended")


async def model_of_the_agent(management: ClientManagement, state: BalancerDesiredState) -> Any:
    """It serves the model of before, though another one was wanted that is not there."""
    agent = await until(management, lambda agent: agent.state_application_status == "Applied")
    return agent.model_path == state.model.local_path


async def agent_details(
    management: ClientManagement, before: BalancerDesiredState
) -> dict[str, Any]:
    agent_id = (await management.get_agents()).agents[0].id
    seen: dict[str, Any] = {
        "metadata": (await management.get_model_metadata(agent_id)).metadata,
        "no_template": await management.get_chat_template_override(agent_id),
    }
    template = ChatTemplate(content="{{ messages[0].content }}")
    changes = {"chat_template_override": template, "use_chat_template_override": True}
    await management.put_balancer_desired_state(before.model_copy(update=changes))
    await until(management, lambda agent: agent.uses_chat_template_override)
    seen["template"] = (await management.get_chat_template_override(agent_id)).content
    missing = AgentDesiredModel.local_to_agent("/models/nope.gguf")
    await management.put_balancer_desired_state(before.model_copy(update={"model": missing}))
    agent = await until(management, lambda agent: agent.issues)
    seen["issues"] = [issue.model_dump() for issue in agent.issues]
    await management.put_balancer_desired_state(before)
    await until(management, lambda agent: agent.state_application_status == "Applied")
    try:
        await management.get_model_metadata("nobody")
    except HttpError as error:
        seen["unknown_agent"] = error.status_code
    return seen


async def refusals(inference: ClientInference) -> dict[str, Any]:
    """What goes wrong with a request is a message that the client can parse."""
    question = ConversationMessage(content="Weather?", role="user")

    def asked(**options: Any) -> ContinueFromConversationHistoryParams:
        return ContinueFromConversationHistoryParams(
            add_generation_prompt=True,
            conversation_history=[question],
            max_tokens=5,
            **{"enable_thinking": False, **options},
        )

    schema = ValidatedParametersSchema(type="object", properties={"city": {"type": 123}})
    function = Function(name="weather", description="Of a city.", parameters=schema)
    grammar = GbnfGrammarConstraint(grammar="nonsense", root="root")
    cases = {
        "bad_tool": asked(tools=[Tool(function=function)]),
        "bad_grammar": asked(grammar=grammar),
        "thinking_with_grammar": asked(grammar=grammar, enable_thinking=True),
    }
    seen: dict[str, Any] = {}
    for name, params in cases.items():
        over_socket = await collect(await inference.continue_from_conversation_history(params))
        seen[name] = over_socket["kinds"]
    return seen


async def embeddings(
    inference: ClientInference, management: ClientManagement, before: BalancerDesiredState
) -> dict[str, Any]:
    batch = GenerateEmbeddingBatchParams(
        input_batch=[
            EmbeddingInputDocument(content=text, id=name)
            for name, text in {"a": "Hello", "b": "World", "long": "word " * 5000}.items()
        ],
        normalization_method=EmbeddingNormalizationMethod.l2(),
    )
    seen: dict[str, Any] = {}
    try:
        [message async for message in inference.generate_embedding_batch(batch)]
    except HttpError as error:
        seen["embeddings_not_enabled"] = error.status_code
    parameters = before.inference_parameters.model_copy(update={"enable_embeddings": True})
    await management.put_balancer_desired_state(
        before.model_copy(update={"inference_parameters": parameters})
    )
    messages = [message async for message in inference.generate_embedding_batch(batch)]
    seen["embedding_kinds"] = [str(message.kind) for message in messages]
    seen["embedding_error"] = messages[-1].error_message
    seen["embedding_lengths"] = {
        message.embedding_data.source_document_id: len(message.embedding_data.embedding)
        for message in messages
        if message.embedding_data
    }
    raw = ContinueFromRawPromptParams(max_tokens=1, raw_prompt="Hello")
    seen["generation_disabled"] = await collect(await inference.continue_from_raw_prompt(raw))
    await management.put_balancer_desired_state(before)
    return seen


def parse_golden(text: str) -> dict[str, list[str]]:
    """What the client takes our messages for."""
    return {
        name: [str(parse_inference_client_message(message).kind) for message in messages]
        for name, messages in json.loads(text).items()
    }


async def collect(stream: Any) -> dict[str, Any]:
    return told([message async for message in stream])


if __name__ == "__main__":
    session = asyncio.run(main(sys.argv[1]))
    session["golden"] = parse_golden(sys.stdin.read())
    json.dump(session, sys.stdout)
