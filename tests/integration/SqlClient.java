import java.sql.*;

/** Runs queries by JDBC; prints each row as a line of its columns, with tabs between. */
final class SqlClient {
  public static void main(String[] arguments) throws Exception {
    try (Connection connection = DriverManager.getConnection(arguments[0])) {
      try (ResultSet tables = connection.getMetaData().getTables(null, null, arguments[1], null)) {
        while (tables.next()) {
          System.out.println("table " + tables.getString("TABLE_NAME"));
        }
      }
      try (ResultSet columns = connection.getMetaData().getColumns(null, null, arguments[1], "%")) {
        while (columns.next()) {
          System.out.println("column " + columns.getString("COLUMN_NAME") + " " + columns.getString("TYPE_NAME"));
        }
      }
      for (int at = 2; at < arguments.length; at++) {
        try (Statement statement = connection.createStatement();
            ResultSet rows = statement.executeQuery(arguments[at])) {
          int width = rows.getMetaData().getColumnCount();
          while (rows.next()) {
            StringBuilder line = new StringBuilder("row");
            for (int column = 1; column <= width; column++) {
              line.append('\t').append(rows.getObject(column));
            }
            System.out.println(line);
          }
        } catch (SQLException error) {
          System.out.println("error " + error.getMessage());
        }
      }
    }
  }
}
