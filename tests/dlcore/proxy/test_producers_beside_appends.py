"""Producers whose log others append to atomically: each record once, under any owner."""

from __future__ import annotations

from tests.fixtures.memory_namespace import read_all
from tests.fixtures.served_proxies import Proxies, with_proxies
from tests.fixtures.staged_records import batch


def test_a_producer_is_remembered_over_appends_and_owners() -> None:
    """The stamps for the next owner lie before an append, which has no producers."""

    async def scenario(served: Proxies) -> None:
        client = await served.start()
        driver = await served.cluster.open("driver")
        producer: object = "meter"
        for turn in range(4):
            stream, ready = await client.opened_with("clicks", producer=producer)
            assert ready["sequence"] == 2 * turn - 1
            producer = ready["producer"]
            await stream.send(b"%d" % (2 * turn), b"%d" % (2 * turn + 1))
            await stream.acked(2)
            appending = await driver.begin_append("job", turn)
            await appending.write_batch("clicks", batch(f"s{turn}"))
            assert (await appending.commit()).committed
            assert await stream.last_reply() is None
            if turn % 2:
                await client.act("release", log="clicks")
        log = await served.cluster.namespaces[0].open_log("clicks")
        found = [each.payload.decode() for each in await read_all(log)]
        assert found == [
            text for turn in range(4) for text in (str(2 * turn), str(2 * turn + 1), f"s{turn}")
        ]

    with_proxies("clicks")(scenario)
