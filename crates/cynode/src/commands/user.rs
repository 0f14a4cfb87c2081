//! `user`: manages users.

use cynode_api::{API_VERSION, User as ApiUser, UserCreate};

use super::{CommandResult, age, format_time, newest, print_created, print_list, print_object};
use crate::{
    cli::{Globals, User},
    connect,
    output::TableStyle,
    resolve,
};

pub async fn run(globals: &Globals, command: User) -> CommandResult {
    let client = connect::user_client(globals)?;
    match command {
        User::Create { name, admin } => {
            let request = UserCreate {
                version: Some(API_VERSION),
                name,
                is_admin: admin,
            };
            let user = client.create_user(&request).await?;
            let note = format!(
                "created {} '{}'; create a token with 'cynode token create --user {}'",
                role(&user),
                user.name,
                user.id
            );
            print_created(globals, &user, &user.id.to_string(), &note)
        }
        User::List { list } => {
            let users: Vec<ApiUser> = newest(&client, list, Vec::new(), |_| true).await?;
            let style = TableStyle::new(list.wide);
            print_list(
                globals,
                style,
                &users,
                ["USER", "NAME", "ROLE", "AGE", "BY"],
                |user| {
                    [
                        style.id(&user.id),
                        user.name.clone(),
                        role(user).to_owned(),
                        age(user.created_at),
                        user.created_by.clone(),
                    ]
                },
            )
        }
        User::Show { user } => {
            let user = client.user(resolve::user(&client, &user).await?).await?;
            let fields = [
                ("user", user.id.to_string()),
                ("name", user.name.clone()),
                ("role", role(&user).to_owned()),
                ("created", format_time(user.created_at)),
                ("by", user.created_by.clone()),
            ];
            print_object(globals, &user, &fields)
        }
    }
}

const fn role(user: &ApiUser) -> &'static str {
    if user.is_admin {
        "administrator"
    } else {
        "user"
    }
}
