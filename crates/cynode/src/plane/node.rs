//! `node`.

use cynode_api::{API_VERSION, Capability, LargestLimits, Node as Object, NodeKeyCreate};
use cynode_client::UserClient;

use super::{Outcome, age, done, list, made, moment, none_such, seconds, show, word};
use crate::{
    cli::{Globals, Node, NodeKey},
    connect,
    failure::Failure,
    output,
};

pub async fn run(globals: &Globals, command: Node) -> Outcome {
    let client = connect::plane(globals)?;
    match command {
        Node::List => {
            let nodes = client.nodes().await?;
            list(
                globals,
                &nodes,
                [
                    "NODE",
                    "NAME",
                    "STATE",
                    "SANDBOXES",
                    "HEARTBEAT",
                    "ADDRESS",
                    "LABELS",
                ],
                |node| {
                    let sandboxes = format!(
                        "{}/{}",
                        node.running_sandboxes, node.capability.max_sandboxes
                    );
                    [
                        node.id.to_string(),
                        node.name.clone(),
                        word(&node.state),
                        sandboxes,
                        age(node.last_heartbeat_at),
                        node.api_url.clone(),
                        labels(node),
                    ]
                },
            )
        }
        Node::Show { node } => {
            let node = find(&client, &node).await?;
            let has = &node.capability;
            let fields = [
                ("node", node.id.to_string()),
                ("name", node.name.clone()),
                ("state", word(&node.state)),
                ("reason", node.reason.clone().unwrap_or_default()),
                ("address", node.api_url.clone()),
                (
                    "sandboxes",
                    format!("{} of {}", node.running_sandboxes, has.max_sandboxes),
                ),
                ("version", has.version.clone()),
                (
                    "engine",
                    format!(
                        "{}{}",
                        has.engine,
                        if has.rootless { ", rootless" } else { "" }
                    ),
                ),
                (
                    "machine",
                    format!(
                        "{} processors, {}",
                        has.cpus,
                        output::size(has.memory_bytes)
                    ),
                ),
                ("sandbox limits", limits(has)),
                (
                    "unenforced",
                    has.unenforced
                        .iter()
                        .map(word)
                        .collect::<Vec<_>>()
                        .join(", "),
                ),
                ("labels", labels(&node)),
                (
                    "images",
                    has.images
                        .iter()
                        .map(|image| image.reference.as_str())
                        .collect::<Vec<_>>()
                        .join(", "),
                ),
                ("registered", moment(node.registered_at)),
                ("heartbeat", moment(node.last_heartbeat_at)),
            ];
            show(globals, &node, &fields)
        }
        Node::Drain { node, undo } => {
            let found = find(&client, &node).await?;
            let node = client.drain_node(found.id, !undo).await?;
            let said = if undo {
                "is given work again"
            } else {
                "is given no new work; what runs there goes on"
            };
            done(globals, &node, &format!("node '{}' {said}", node.name))
        }
        Node::Key {
            command: NodeKey::Create(args),
        } => {
            let request = NodeKeyCreate {
                version: Some(API_VERSION),
                reusable: args.reusable,
                expires_in_seconds: seconds(args.expires),
            };
            let key = client.create_node_key(&request).await?;
            let uses = if args.reusable {
                "any number of nodes"
            } else {
                "one node"
            };
            made(
                globals,
                &key,
                &key.psk,
                &format!(
                    "good for {uses} until {}; it is not shown again",
                    moment(key.expires_at)
                ),
            )
        }
    }
}

/// The largest limits of a sandbox there, and what those of all may add up to.
fn limits(has: &Capability) -> String {
    let Some(LargestLimits {
        memory_bytes,
        cpus,
        pids,
    }) = has.largest
    else {
        return String::new();
    };
    let each = format!(
        "at most {}, {cpus} processors, {pids} processes",
        output::size(memory_bytes)
    );
    has.promised_memory_bytes.map_or_else(
        || each.clone(),
        |bytes| format!("{each}; all together {}", output::size(bytes)),
    )
}

fn labels(node: &Object) -> String {
    node.capability
        .labels
        .iter()
        .map(|(key, value)| format!("{key}={value}"))
        .collect::<Vec<_>>()
        .join(",")
}

async fn find(client: &UserClient, wanted: &str) -> Result<Object, Failure> {
    let nodes = client.nodes().await?;
    nodes
        .into_iter()
        .find(|node| node.name == wanted || node.id.to_string() == wanted)
        .ok_or_else(|| none_such("node", wanted))
}
