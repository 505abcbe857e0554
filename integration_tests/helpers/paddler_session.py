"""What a user of the published client does, run with that client's own environment.

Arguments: the address of the balancer. Prints one JSON object with what the client has seen.
"""

import asyncio
import json
import sys
from typing import Any

from paddler_client.agent_desired_model import AgentDesiredModel
from paddler_client.balancer_desired_state import BalancerDesiredState
from paddler_client.client_inference import ClientInference
from paddler_client.client_management import ClientManagement
from paddler_client.continue_from_conversation_history_params import (
    ContinueFromConversationHistoryParams,
)
from paddler_client.continue_from_raw_prompt_params import ContinueFromRawPromptParams
from paddler_client.conversation_message import ConversationMessage
from paddler_client.inference_parameters import InferenceParameters


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
        seen["metrics"] = await management.get_metrics()
    return seen


async def collect(stream: Any) -> dict[str, Any]:
    return told([message async for message in stream])


if __name__ == "__main__":
    json.dump(asyncio.run(main(sys.argv[1])), sys.stdout)
