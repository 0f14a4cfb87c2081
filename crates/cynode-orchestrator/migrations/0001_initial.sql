-- Forward only: a later change is a later file. Ids are made by the callers, version 7, so that their order is that of time.

create table users (
    id uuid primary key,
    name text not null unique,
    is_admin boolean not null default false,
    created_by text not null,
    created_at timestamptz not null default now()
);

create table groups (
    id uuid primary key,
    name text not null unique,
    created_by text not null,
    created_at timestamptz not null default now()
);

create table group_members (
    group_id uuid not null references groups (id) on delete cascade,
    user_id uuid not null references users (id) on delete cascade,
    primary key (group_id, user_id)
);
create index on group_members (user_id);

create table projects (
    id uuid primary key,
    name text not null,
    slug text not null unique,
    scope text,
    metadata jsonb not null default '{}',
    owner_id uuid not null references users (id),
    created_by text not null,
    created_at timestamptz not null default now(),
    updated_at timestamptz not null default now()
);
create index on projects (owner_id);

create table tasks (
    id uuid primary key,
    project_id uuid references projects (id),
    name text not null,
    description text,
    requirements jsonb not null default '[]',
    acceptance_criteria jsonb not null default '[]',
    status text not null default 'open' check (status in ('open', 'active', 'done', 'failed', 'canceled')),
    profile text,
    metadata jsonb not null default '{}',
    owner_id uuid not null references users (id),
    created_by text not null,
    created_at timestamptz not null default now(),
    updated_at timestamptz not null default now()
);
create index on tasks (project_id);
create index on tasks (owner_id);

-- What a caller shows is compared by its hash; the token itself is nowhere.
create table api_tokens (
    id uuid primary key,
    hash bytea not null unique,
    kind text not null check (kind in ('user', 'project_manager', 'project_analyst', 'sandbox')),
    user_id uuid not null references users (id),
    project_id uuid references projects (id),
    task_ids uuid[] not null default '{}',
    job_id uuid,
    session_id uuid,
    created_by text not null,
    created_at timestamptz not null default now(),
    expires_at timestamptz not null,
    revoked_at timestamptz
);
create index on api_tokens (user_id);

create table nodes (
    id uuid primary key,
    name text not null unique,
    api_url text not null,
    capability jsonb not null default '{}',
    draining boolean not null default false,
    not_ready text,
    -- Given up: its work was failed or went elsewhere.
    is_lost boolean not null default false,
    running_sandboxes integer not null default 0,
    -- Tokens are derived from the orchestrators' key and this number; only hashes of what the node shows are here.
    token_epoch bigint not null default 1,
    node_token_hash bytea not null unique,
    next_token_hash bytea unique,
    tokens_rotated_at timestamptz not null default now(),
    config_revision bigint not null default 0,
    registered_at timestamptz not null default now(),
    last_heartbeat_at timestamptz not null default now()
);

create table node_keys (
    id uuid primary key,
    hash bytea not null unique,
    reusable boolean not null default false,
    created_by text not null,
    created_at timestamptz not null default now(),
    expires_at timestamptz,
    used_at timestamptz,
    used_by uuid
);

-- The spec's tables, with its names.
create table sandbox_images (
    id uuid primary key,
    name text not null unique,
    description text,
    created_at timestamptz not null default now(),
    updated_at timestamptz not null default now(),
    updated_by text not null
);
create index on sandbox_images (name);

create table sandbox_image_versions (
    id uuid primary key,
    sandbox_image_id uuid not null references sandbox_images (id) on delete cascade,
    version text not null,
    image_ref text not null,
    image_digest text,
    capabilities jsonb not null default '{}',
    is_allowed boolean not null default false,
    created_at timestamptz not null default now(),
    updated_at timestamptz not null default now(),
    unique (sandbox_image_id, version)
);
create index on sandbox_image_versions (sandbox_image_id);
create index on sandbox_image_versions (is_allowed);
create index on sandbox_image_versions (image_ref);

create table node_sandbox_image_availability (
    id uuid primary key,
    node_id uuid not null references nodes (id) on delete cascade,
    sandbox_image_version_id uuid not null references sandbox_image_versions (id) on delete cascade,
    status text not null,
    last_checked_at timestamptz not null default now(),
    details jsonb,
    unique (node_id, sandbox_image_version_id)
);
create index on node_sandbox_image_availability (node_id);

create table sessions (
    session_id uuid primary key,
    task_id uuid not null references tasks (id),
    node_id uuid not null references nodes (id),
    state text not null check (state in ('creating', 'running', 'ending', 'ended', 'failed', 'lost')),
    -- What its creator sent, and what its node was asked for.
    body jsonb not null,
    request jsonb not null,
    -- The session as its node last described it.
    object jsonb,
    -- Asked for and not yet confirmed by the node.
    ending jsonb,
    end_reason text,
    image_version_id uuid references sandbox_image_versions (id),
    owner_id uuid not null references users (id),
    created_by text not null,
    created_at timestamptz not null default now(),
    updated_at timestamptz not null default now(),
    -- Nobody else brings it forward before then.
    lease_until timestamptz not null default now()
);
create index on sessions (task_id);
create index on sessions (owner_id);
create index on sessions (node_id) where state in ('creating', 'running', 'ending', 'lost');
create index on sessions (state) where state in ('creating', 'running', 'ending');

create table jobs (
    job_id uuid primary key,
    task_id uuid not null references tasks (id),
    node_id uuid references nodes (id),
    state text not null check (state in ('accepted', 'in_progress', 'completed', 'failed', 'timeout', 'canceled')),
    body jsonb not null,
    request jsonb not null,
    retry text not null check (retry in ('never', 'on_node_loss')),
    -- How many nodes it was given to.
    attempt integer not null default 0,
    stop_requested boolean not null default false,
    -- The node has been told that its result is here.
    acknowledged boolean not null default false,
    object jsonb not null,
    late_result jsonb,
    -- The whole kept output, once it is here: the hash of a blob.
    output_sha256 text,
    image_version_id uuid references sandbox_image_versions (id),
    owner_id uuid not null references users (id),
    created_by text not null,
    created_at timestamptz not null default now(),
    updated_at timestamptz not null default now(),
    lease_until timestamptz not null default now()
);
create index on jobs (task_id);
create index on jobs (owner_id);
create index on jobs (lease_until) where state in ('accepted', 'in_progress') or not acknowledged;
create index on jobs (node_id) where state in ('accepted', 'in_progress');

-- Jobs that went elsewhere while their node was lost: to be stopped there when it is back.
create table job_leftovers (
    job_id uuid not null references jobs (job_id) on delete cascade,
    node_id uuid not null references nodes (id) on delete cascade,
    primary key (job_id, node_id)
);

-- The row is locked by whoever adds an event until that is committed: cursors rise without gaps, and nobody can read past
-- one that is still to come.
create table event_head (
    one boolean primary key default true check (one),
    last bigint not null,
    -- Events up to this one are gone.
    expired bigint not null default 0
);
insert into event_head (last) values (0);

create table events (
    cursor bigint primary key,
    at timestamptz not null default now(),
    type text not null,
    project_id uuid,
    task_id uuid not null,
    job_id uuid,
    session_id uuid,
    state text not null,
    result_ref text
);
create index on events (task_id, cursor);
create index on events (project_id, cursor);

create table artifacts (
    id uuid primary key,
    task_id uuid not null references tasks (id),
    path text not null,
    version bigint not null,
    sha256 text not null,
    size bigint not null,
    media_type text not null,
    created_by text not null,
    created_at timestamptz not null default now(),
    unique (task_id, path, version)
);
create index on artifacts (sha256);

create table system_settings (
    key text primary key,
    value jsonb not null,
    revision bigint not null default 1,
    updated_at timestamptz not null default now(),
    updated_by text not null
);

create table preferences (
    scope text not null check (scope in ('task', 'project', 'user', 'group', 'system')),
    scope_id uuid not null,
    key text not null,
    value jsonb not null,
    revision bigint not null default 1,
    updated_at timestamptz not null default now(),
    updated_by text not null,
    primary key (scope, scope_id, key)
);
