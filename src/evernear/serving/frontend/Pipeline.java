package evernear;

import io.netty.channel.Channel;
import io.netty.channel.ChannelPipeline;
import java.util.Map;
import java.util.Set;
import org.pytorch.serve.ServerInitializer;
import org.pytorch.serve.util.ConfigManager;
import org.pytorch.serve.util.ConnectorType;
import org.pytorch.serve.util.TokenAuthorization.TokenType;

/** TorchServe's handlers, with evernear's handlers before and between them. */
final class Pipeline extends ServerInitializer {
    private static final Map<ConnectorType, Set<TokenType>> TOKENS =
            Map.of(
                    ConnectorType.INFERENCE_CONNECTOR, Set.of(TokenType.INFERENCE),
                    ConnectorType.MANAGEMENT_CONNECTOR, Set.of(TokenType.MANAGEMENT, TokenType.TOKEN_API),
                    ConnectorType.METRICS_CONNECTOR, Set.of());

    private final ConnectorType type;
    private final Traffic traffic;
    private final byte[] query;

    /** {@code query} is the image with which GET /ready tests the server, or null to disable this path. */
    Pipeline(ConnectorType type, Traffic traffic, byte[] query) {
        super(null, type);
        this.type = type;
        this.traffic = traffic;
        this.query = query;
    }

    @Override
    public void initChannel(Channel channel) {
        super.initChannel(channel);
        ChannelPipeline pipeline = channel.pipeline();
        Connection connection = new Connection(traffic);
        boolean isInference = type == ConnectorType.INFERENCE_CONNECTOR;
        boolean hasProbe = isInference && query != null;
        int maxBytes = isInference ? ConfigManager.getInstance().getMaxRequestSize() : 0; // other APIs use only the URL
        pipeline.replace("http", "decoder", connection.decoder());
        pipeline.addAfter("decoder", "encoder", connection.encoder());
        pipeline.addAfter("encoder", "connection", connection);
        pipeline.addAfter("connection", "admission", new Admission(maxBytes, TOKENS.get(type), hasProbe));
        if (isInference) {
            pipeline.addBefore("handler", "probe", new Probe(traffic, query));
            pipeline.addBefore("handler", "form", new Form(maxBytes));
        }
    }
}
