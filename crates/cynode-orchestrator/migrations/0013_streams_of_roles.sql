-- An egress role writes streams of its own, as nodes do; the orchestrator fetches them. Of such a stream node_id is the instance of the role.
alter table audit_streams add column role text;

-- The instance of each role whose records were accepted last.
create table egress_roles (
    role text primary key,
    instance uuid not null,
    since timestamptz not null default now()
);
