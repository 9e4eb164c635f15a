//! One limit of each tenant over all processes of a service.

#[allow(dead_code)]
mod link;
