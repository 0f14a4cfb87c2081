-- A node writes streams of its own and sends them in batches. No orchestrator closes them for being silent: a node may be away for days. So their lease
-- never ends. A node's stream is closed when the node sends the first batch of its next one.
alter table audit_streams add column node_id uuid;
create index on audit_streams (node_id, opened_at) where node_id is not null;
