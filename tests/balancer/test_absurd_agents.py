"""One agent says anything that can be said; another is honest, and its clients notice nothing.

``HEADRACE_EXAMPLES`` sets how many histories are played.
"""

import asyncio
import os
from typing import Any

import httpx
from bodies import PATIENT
from frames import events, to_balancer, values_of
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from msgspec.structs import replace
from played import PlayedAgent

from balancer.app import create_app
from balancer.balancer import Balancer
from balancer.exchange import Exchange, Told
from common.ids import AgentId, RequestId, TokenId
from common.messages import (
    Busy,
    Cancel,
    Described,
    Detokenize,
    Detokenized,
    Document,
    Embed,
    Embedded,
    Event,
    Failed,
    Finished,
    Generate,
    Join,
    Noted,
    Pooling,
    RawPrompt,
    Status,
    Step,
    ToBalancer,
    TokenGenerated,
    decode_to_agent,
    decode_to_balancer,
    encode,
)

CAPACITY, PATIENCE = 4, 3600.0
BAD = AgentId("bad")
VIEWS = ("/metrics", "/api/v1/agents", f"/api/v1/agent/{BAD}/status", "/v1/models")


class StillLoop(asyncio.SelectorEventLoop):
    """Time stands still until the test moves it."""

    now = 100.0

    def time(self) -> float:
        return self.now


class Histories(RuleBasedStateMachine):
    @initialize(slots=st.integers(1, 3))
    def start(self, slots: int) -> None:
        self.loop = StillLoop()
        self.runner = asyncio.Runner(loop_factory=lambda: self.loop)
        self.slots = slots
        self.runner.run(self.begin())

    async def begin(self) -> None:
        self.balancer = Balancer(buffer_capacity=CAPACITY, patience=PATIENCE)
        self.good = PlayedAgent(self.balancer, "good", slots=self.slots, fingerprint="f")
        self.count = 0
        self.exchanges: dict[RequestId, Exchange] = {}
        self.cancelled: set[RequestId] = set()
        self.told: dict[RequestId, list[Told]] = {}
        self.at_good: dict[RequestId, int] = {}
        """Requests that the honest agent has, and how many tokens it has told of them."""
        self.asked_good: set[RequestId] = set()
        """Consultations that it has not answered."""
        self.at_bad: set[RequestId] = set()
        """What the other one was ever asked."""
        self.is_here = False

    def run(self, *calls: Any) -> None:
        """On the loop, then let what waits there happen."""

        async def act() -> None:
            for function, *arguments in calls:
                function(*arguments)
            await asyncio.sleep(0)

        self.runner.run(act())
        self.read()

    def read(self) -> None:
        """What agents were sent, and clients told."""
        while not self.good.frames.empty():
            match decode_to_agent(self.good.frames.get_nowait()):
                case Generate(request_id=request_id) | Embed(request_id=request_id):
                    assert request_id not in self.at_good
                    assert request_id not in self.cancelled
                    self.at_good[request_id] = 0
                case Detokenize(request_id):
                    self.asked_good.add(request_id)
                case Cancel():
                    pass
                case frame:
                    raise AssertionError(f"not for it: {frame}")
        self.runner.run(self.read_exchanges())

    async def read_exchanges(self) -> None:
        for request_id, exchange in self.exchanges.items():
            while not exchange.is_empty:
                told = await anext(exchange)
                before = self.told[request_id]
                assert not (before and before[-1].is_last), "it was over"
                assert told.event.request_id == request_id, "another's"
                before.append(told)

    @rule(seconds=st.integers(1, 7))
    def wait(self, seconds: int) -> None:
        for _ in range(seconds):
            self.run((self.report,))
            self.loop.now += 1
            self.run()

    def report(self) -> None:
        self.good.report(slots=self.slots, fingerprint="f")

    # What clients do

    def new(self) -> RequestId:
        self.count += 1
        request_id = RequestId(f"r{self.count}")
        self.told[request_id] = []
        return request_id

    @rule()
    def generate(self) -> None:
        request_id = self.new()
        frame = Generate(request_id=request_id, prompt=RawPrompt("Hi"), max_tokens=5)
        self.ask(request_id, encode(frame))

    @rule()
    def embed(self) -> None:
        request_id = self.new()
        documents = (Document("0", "Hi"),)
        frame = Embed(request_id=request_id, documents=documents, pooling=Pooling.LAST)
        self.ask(request_id, encode(frame))

    def ask(self, request_id: RequestId, frame: bytes) -> None:
        def submit() -> None:
            self.exchanges[request_id] = self.balancer.submit(request_id, frame)

        self.run((submit,))

    @rule()
    def consult(self) -> None:
        request_id = self.new()
        frame = encode(Detokenize(request_id, (TokenId(1),)))

        def consult() -> None:
            self.exchanges[request_id] = self.balancer.consult(request_id, frame, None)

        self.run((consult,))

    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        if open_ := sorted(self.open()):
            request_id = data.draw(st.sampled_from(open_))
            self.cancelled.add(request_id)
            self.run((self.balancer.cancel, request_id))

    def open(self) -> set[RequestId]:
        return {
            request_id
            for request_id, told in self.told.items()
            if request_id not in self.cancelled and not (told and told[-1].is_last)
        }

    # What the honest agent does

    @rule(data=st.data())
    def a_token(self, data: st.DataObject) -> None:
        if self.at_good:
            request_id = data.draw(st.sampled_from(sorted(self.at_good)))
            self.at_good[request_id] += 1
            self.run((self.good.say_token, request_id, "good"))

    @rule(data=st.data())
    def an_end(self, data: st.DataObject) -> None:
        if self.at_good:
            self.end(data.draw(st.sampled_from(sorted(self.at_good))))

    def end(self, request_id: RequestId) -> None:
        tokens = self.at_good.pop(request_id)
        self.run((self.good.finish, request_id))
        if request_id not in self.cancelled:
            honest = [told for told in self.told[request_id] if told.generated_by == "good"]
            assert len(honest) == tokens + 1, "as many as it said"
            assert isinstance(honest[-1].event, Finished)
            assert self.told[request_id][-1] is honest[-1]

    @rule(data=st.data())
    def an_answer(self, data: st.DataObject) -> None:
        if self.asked_good:
            self.answer(data.draw(st.sampled_from(sorted(self.asked_good))))

    def answer(self, request_id: RequestId) -> None:
        self.asked_good.remove(request_id)
        answer = Detokenized(request_id, "good")
        self.run((self.good.say, answer))
        if request_id not in self.cancelled:
            assert [told.event for told in self.told[request_id]] == [answer]

    # What the other one does

    def link(self, frame: bytes) -> None:
        """As the link hands it over; to be asked nothing is no reason to be silent."""
        match decode_to_balancer(frame):
            case Step(said):
                self.balancer.happened(BAD, said)
            case Noted() as note:
                self.balancer.noted(BAD, note)
            case Status() as status:
                self.balancer.report(BAD, status)
            case Described() as described:
                self.balancer.described(BAD, described)
            case Join() as join:
                self.is_here = True
                self.balancer.join(replace(join, agent_id=BAD), self.take, self.drop)

    def drop(self, _reason: str) -> None:
        """It is given up: its link is closed, and what it says is not heard any more."""
        self.is_here = False

    def take(self, data: bytes) -> None:
        match decode_to_agent(data):
            case Generate(request_id=request_id) | Embed(request_id=request_id):
                self.at_bad.add(request_id)
            case _:
                pass

    @rule(join=values_of(Join))
    def joins(self, join: Join) -> None:
        self.run((self.link, encode(join)))

    @rule(
        join=values_of(Join),
        slots=st.integers(0, 3),
        fingerprint=st.sampled_from(["f", "f", "other"]),
    )
    def joins_with_some_slots(self, join: Join, slots: int, fingerprint: str) -> None:
        status = replace(
            join.status, slots_total=slots, draining=False, fingerprint=fingerprint, step_age=None
        )
        self.run((self.link, encode(replace(join, status=status))))

    @rule(frame=to_balancer)
    def says_something(self, frame: ToBalancer) -> None:
        if self.is_here and not isinstance(frame, Join):
            self.run((self.link, encode(frame)))

    @rule(said=st.lists(events, min_size=1, max_size=4), data=st.data())
    def speaks_of_requests(self, said: list[Event], data: st.DataObject) -> None:
        """Of its own, of others', of some that are over."""
        if self.is_here and self.told:
            known = st.sampled_from(sorted(self.told))
            said = [replace(event, request_id=data.draw(known)) for event in said]
            self.run((self.link, encode(Step(tuple(said)))))

    @rule(said=values_of(TokenGenerated | Embedded | Finished | Busy), data=st.data())
    def speaks_of_its_own(self, said: Event, data: st.DataObject) -> None:
        if self.is_here and self.at_bad:
            request_id = data.draw(st.sampled_from(sorted(self.at_bad)))
            self.run((self.link, encode(Step((replace(said, request_id=request_id),)))))

    @rule()
    def leaves(self) -> None:
        if self.is_here:
            self.is_here = False
            self.run((self.balancer.leave, BAD, "it was lost"))

    # What must hold

    @invariant()
    def no_client_of_the_honest_one_hears_of_the_other(self) -> None:
        for request_id, told in self.told.items():
            if request_id not in self.at_bad:
                names = {each.generated_by for each in told}
                assert names <= {"good", None}
        for request_id in self.at_good.keys() - self.cancelled:
            assert not any(told.is_last for told in self.told[request_id]), "ended by somebody else"

    @invariant()
    def slots_are_those_of_the_honest_one(self) -> None:
        bound = {view.agent_id: view.slots_bound for view in self.balancer.agents}
        assert bound[self.good.agent_id] == len(self.at_good)
        assert all(count >= 0 for count in bound.values())

    def teardown(self) -> None:
        """The balancer can be looked at; without the liar, all is served to its end."""
        if not hasattr(self, "runner"):
            return
        with self.runner:
            self.runner.run(self.look())
            self.leaves()
            while self.at_good:
                self.end(min(self.at_good))
            while self.asked_good:
                self.answer(min(self.asked_good))
            self.loop.now += PATIENCE  # of what only an agent like the other could go on with
            self.run()
            assert self.balancer.buffered == 0
            assert self.open() == set()
            self.slots_are_those_of_the_honest_one()
            self.generate()
            assert list(self.at_good) == [f"r{self.count}"]
            self.run((self.balancer.close,))
            assert isinstance(self.told[RequestId(f"r{self.count}")][-1].event, Failed)

    async def look(self) -> None:
        transport = httpx.ASGITransport(create_app(self.balancer))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            for path in VIEWS if self.is_here else VIEWS[:2]:
                assert (await client.get(path)).status_code == 200


TestHistories = Histories.TestCase
TestHistories.settings = settings(
    PATIENT, max_examples=int(os.environ.get("HEADRACE_EXAMPLES", "40")), stateful_step_count=30
)
