//! `group`: manages groups of users.

use cynode_api::{API_VERSION, Group as ApiGroup, GroupCreate};

use super::{CommandResult, age, format_time, newest, print_created, print_list, print_object};
use crate::{
    cli::{Globals, Group},
    connect,
    output::TableStyle,
    resolve,
};

pub async fn run(globals: &Globals, command: Group) -> CommandResult {
    let client = connect::user_client(globals)?;
    match command {
        Group::Create { name, members } => {
            let mut users = Vec::new();
            for member in &members {
                users.push(resolve::user(&client, member).await?.to_string());
            }
            let request = GroupCreate {
                version: Some(API_VERSION),
                name,
                members: users,
            };
            let group = client.create_group(&request).await?;
            print_created(
                globals,
                &group,
                &group.id.to_string(),
                &format!("group '{}' has {} members", group.name, group.members.len()),
            )
        }
        Group::List { list } => {
            let groups: Vec<ApiGroup> = newest(&client, list, Vec::new(), |_| true).await?;
            let style = TableStyle::new(list.wide);
            print_list(
                globals,
                style,
                &groups,
                ["GROUP", "NAME", "MEMBERS", "AGE", "BY"],
                |group| {
                    [
                        style.id(&group.id),
                        group.name.clone(),
                        group.members.join(","),
                        age(group.created_at),
                        group.created_by.clone(),
                    ]
                },
            )
        }
        Group::Show { group } => {
            let group = client.group(resolve::group(&client, &group).await?).await?;
            let members = if group.members.is_empty() {
                "none".to_owned()
            } else {
                group.members.join(", ")
            };
            let fields = [
                ("group", group.id.to_string()),
                ("name", group.name.clone()),
                ("members", members),
                ("created", format_time(group.created_at)),
                ("by", group.created_by.clone()),
            ];
            print_object(globals, &group, &fields)
        }
    }
}
