"""The journal in a site's Redis (journal.redis), for a run whose controller may move to another node.

- `server`: the connection: requests that are sent again, errors in the user's terms. `settings`: what a server must promise.
- `hold`: which controller may write. `scripts`: the steps that the server takes as one.
- `entries`, `states`: what began, ended, was leased and committed, as a stream. `payloads`: finished groups and answers, as hashes.

Only this package imports the client library. docs/journal-format.md has the keys.
"""
