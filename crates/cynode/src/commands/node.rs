//! `node`: manages nodes.

use cynode_api::{
    API_VERSION, Capability, LargestLimits, ModelServerKind, Node as ApiNode, NodeKeyCreate,
    NodeState,
};

use super::{
    CommandResult, age, api_name, format_time, newest, print_created, print_done, print_list,
    print_object, seconds,
};
use crate::{
    cli::{Globals, Node, NodeKey},
    connect,
    output::{self, TableStyle},
    resolve,
};

pub async fn run(globals: &Globals, command: Node) -> CommandResult {
    let client = connect::user_client(globals)?;
    match command {
        Node::List { list } => {
            let mut nodes: Vec<ApiNode> = newest(&client, list, Vec::new(), |_| true).await?;
            nodes.sort_by_key(|node| node.state != NodeState::Ready);
            let style = TableStyle::new(list.wide);
            print_list(
                globals,
                style,
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
                        style.id(&node.id),
                        node.name.clone(),
                        api_name(&node.state),
                        sandboxes,
                        age(node.last_heartbeat_at),
                        node.api_url.clone(),
                        labels(node),
                    ]
                },
            )
        }
        Node::Show { node } => {
            let node = resolve::node(&client, &node).await?;
            let capability = &node.capability;
            let fields = [
                ("node", node.id.to_string()),
                ("name", node.name.clone()),
                ("state", api_name(&node.state)),
                ("reason", node.reason.clone().unwrap_or_default()),
                ("address", node.api_url.clone()),
                (
                    "sandboxes",
                    format!("{} of {}", node.running_sandboxes, capability.max_sandboxes),
                ),
                ("version", capability.version.clone()),
                (
                    "engine",
                    format!(
                        "{}{}",
                        capability.engine,
                        if capability.rootless {
                            ", rootless"
                        } else {
                            ""
                        }
                    ),
                ),
                (
                    "machine",
                    format!(
                        "{} processors, {}",
                        capability.cpus,
                        output::size(capability.memory_bytes)
                    ),
                ),
                ("sandbox limits", limits(capability)),
                (
                    "unenforced",
                    capability
                        .unenforced
                        .iter()
                        .map(api_name)
                        .collect::<Vec<_>>()
                        .join(", "),
                ),
                ("labels", labels(&node)),
                ("models", models(capability)),
                (
                    "images",
                    capability
                        .images
                        .iter()
                        .map(|image| image.reference.as_str())
                        .collect::<Vec<_>>()
                        .join(", "),
                ),
                ("registered", format_time(node.registered_at)),
                ("heartbeat", format_time(node.last_heartbeat_at)),
            ];
            print_object(globals, &node, &fields)
        }
        Node::Drain { node, undo } => {
            let id = resolve::node(&client, &node).await?.id;
            let node = client.drain_node(id, !undo).await?;
            let state = if undo {
                "accepts work again"
            } else {
                "accepts no new work; running work continues"
            };
            print_done(globals, &node, &format!("node '{}' {state}", node.name))
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
            print_created(
                globals,
                &key,
                &key.psk,
                &format!(
                    "valid for {uses} until {}; it is not shown again",
                    format_time(key.expires_at)
                ),
            )
        }
    }
}

/// The largest limits of one sandbox on the node, and the memory limit of all together.
fn limits(capability: &Capability) -> String {
    let Some(LargestLimits {
        memory_bytes,
        cpus,
        pids,
        disk_bytes,
    }) = capability.largest
    else {
        return String::new();
    };
    let disk = disk_bytes.map_or_else(String::new, |bytes| {
        format!(", a disk of {}", output::size(bytes))
    });
    let each = format!(
        "at most {}, {cpus} processors, {pids} processes{disk}",
        output::size(memory_bytes)
    );
    capability.promised_memory_bytes.map_or_else(
        || each.clone(),
        |bytes| format!("{each}; {} in total", output::size(bytes)),
    )
}

/// The models that the node serves, or why it serves none.
fn models(capability: &Capability) -> String {
    let Some(inference) = &capability.inference else {
        return "no model server".to_owned();
    };
    let kind = inference.kind.map_or("unknown", ModelServerKind::as_str);
    let problem = inference
        .problem
        .iter()
        .map(|problem| format!(" ({problem})"));
    let models = match inference.models.as_slice() {
        [] => "none".to_owned(),
        models => models.join(", "),
    };
    format!("{kind}: {models}{}", problem.collect::<String>())
}

fn labels(node: &ApiNode) -> String {
    node.capability
        .labels
        .iter()
        .map(|(key, value)| format!("{key}={value}"))
        .collect::<Vec<_>>()
        .join(",")
}
