"""The controller's side of weight sync: the coordinator drives all engines through an update, and keeps the ledger of their versions.

A version reaches the engines in one of three ways. By broadcast, while they are paused:

    WeightsBegin    close the gate; every engine: pause, begin_update
    WeightsBucket   all engines concurrently: load_bucket, while the sender broadcasts
    WeightsCommit   every engine: end_update, compare checksums, set_version, resume; then open the gate

Shard to shard, while they generate, through the receivers inside them (`asyncmoe.weights.receiver`):

    WeightsStage    only check that all engines are present; the sender and the receivers do the rest, through memory or a network.
                    In place, without staging memory: close the gate; every engine: pause, begin_update
    WeightsCommit   close the gate; every engine: swap, in one call; then open the gate. But if the weights were written in
                    place or must be compared, or running requests drop their keys and values, every engine gets several
                    calls: pause, begin_update, swap, end_update, compare checksums, resume

Through a directory, while they are paused:

    WeightsFiles    close the gate; every engine: pause, load_files, compare checksums, set_version, resume; then open the gate

Every version goes to the *roster* (`roster.py`): the engines present when the sender last asked (`EnginesAsk`). When an engine joins or
leaves, the next roster differs, and the sender forms a new group with that roster's engines.

All or nothing: an engine that refuses, falls silent or has different checksums is fenced, and an engine that may have part of a version
never resumes (`state.py`). If loading a bucket fails, all engines are fenced, because the engines in the broadcast wait for the failed one.
A sender that fails or falls silent before the first bucket, or while it stages into separate memory, does no harm: the engines keep their
version.

Read `state.py`, the phases of an update; `driver.py`, which moves all engines through them; `ways.py`, the calls of each way; then
`coordinator.py`, which answers the sender.
`asyncmoe.weights.sender` lists the trainer's steps and the requests of each.
"""
