-- Names are for people. A name is taken while a session with it lives; sessions from before this have none.
alter table sessions add column name text;
create unique index live_session_names on sessions (owner_id, name) where state in ('creating', 'running', 'ending');
create index on sessions (name) where name is not null;

-- An image is removed unless work refers to it.
create index on sessions (image_version_id) where image_version_id is not null;
create index on jobs (image_version_id) where image_version_id is not null;
