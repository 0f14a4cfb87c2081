-- The generation of the session that a token's calls use when they name none. 0: no session has been made.
alter table api_tokens add column session_generation bigint not null default 0;
